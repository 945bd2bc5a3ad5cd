"""Sets of characters against the plain definition: a Python set of code points."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.v0_1_genesis.constrained.char_sets import (
    ANY_CHAR,
    CLASS_ESCAPES,
    CODE_POINTS,
    NOT_NEWLINE,
    CharSet,
    python_class,
)

EVERY_POINT = np.arange(CODE_POINTS, dtype=np.int32)


def from_points(points: set[int]) -> CharSet:
    member = np.zeros(CODE_POINTS, np.bool_)
    member[list(points)] = True
    return CharSet.where(member)


def points_of(chars: CharSet) -> set[int]:
    return set(np.flatnonzero(chars.contains(EVERY_POINT)).tolist())


small_sets = st.sets(st.integers(0, 20) | st.integers(CODE_POINTS - 20, CODE_POINTS - 1), max_size=12)


@settings(max_examples=40, deadline=None)
@given(small_sets, small_sets)
def test_union_and_intersection(a: set[int], b: set[int]) -> None:
    assert points_of(from_points(a) | from_points(b)) == a | b
    assert points_of(from_points(a) & from_points(b)) == a & b


def test_complement_leaves_surrogates_out() -> None:
    a = from_points({0, 5, CODE_POINTS - 1})
    assert len(points_of(~a)) == CODE_POINTS - 2048 - 3
    assert not (~ANY_CHAR)
    assert points_of(~~a) == points_of(a)


@pytest.mark.parametrize("escape", CLASS_ESCAPES)
def test_classes_are_those_of_re(escape: str) -> None:
    matches = re.compile(escape).fullmatch
    chars = python_class(escape)
    inside = chars.contains(EVERY_POINT)
    borders = {point + step for point in chars.toggles.tolist() for step in (-1, 0)}
    for point in sorted(borders | set(range(0, CODE_POINTS, 97))):
        if 0 <= point < CODE_POINTS and not 0xD800 <= point < 0xE000:
            assert inside[point] == bool(matches(chr(point)))


def test_dot_is_that_of_re() -> None:
    assert points_of(ANY_CHAR) - points_of(NOT_NEWLINE) == {ord("\n")}
    assert not re.fullmatch(".", "\n")
