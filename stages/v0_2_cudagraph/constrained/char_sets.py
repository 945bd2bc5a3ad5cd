"""Sets of Unicode characters, and what ``\\w``, ``\\d`` and ``\\s`` mean to Python's `re`.

Used by the main process while it normalises a regex, and by the engine to learn what a vocabulary can spell.
The three classes are computed once per process, by asking `re` about every character there is: no table of
ours can disagree with the interpreter that later checks ``re.fullmatch``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

CODE_POINTS = 0x110000
Points = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class CharSet:
    """A set of code points, kept as the sorted points where membership flips: in from the first, out from the
    second, and so on. ``toggles`` is int32 ``[2 * ranges]``."""

    toggles: Points

    @classmethod
    def of(cls, *ranges: tuple[int, int]) -> Self:
        """The union of half-open ranges that are sorted and apart."""
        return cls(np.array([point for bounds in ranges for point in bounds], dtype=np.int32))

    @classmethod
    def where(cls, member: NDArray[np.bool_]) -> Self:
        """The code points ``i`` with ``member[i]``; ``member`` is bool ``[CODE_POINTS]``."""
        flips = np.flatnonzero(np.diff(member, prepend=False, append=False))
        return cls(flips.astype(np.int32))

    def contains(self, points: Points) -> NDArray[np.bool_]:
        return (np.searchsorted(self.toggles, points, side="right") & 1).astype(np.bool_)

    def __bool__(self) -> bool:
        return bool(self.toggles.size)

    def __or__(self, other: CharSet) -> CharSet:
        return union((self, other))

    def __and__(self, other: CharSet) -> CharSet:
        return _combine(self, other, np.logical_and)

    def __invert__(self) -> CharSet:
        return _combine(self, ANY_CHAR, lambda mine, any_char: any_char & ~mine)


Operation = Callable[[NDArray[np.bool_], NDArray[np.bool_]], NDArray[np.bool_]]


def _combine(a: CharSet, b: CharSet, operation: Operation) -> CharSet:
    points = np.union1d(a.toggles, b.toggles).astype(np.int32)
    inside = operation(a.contains(points), b.contains(points))
    return CharSet(points[np.flatnonzero(np.diff(inside, prepend=False))])


def union(sets: Iterable[CharSet]) -> CharSet:
    """The union of many sets at once: the points where the number of sets that one is in becomes or leaves 0."""
    toggles = np.concatenate([np.zeros(0, np.int32), *(chars.toggles for chars in sets)])
    points, place = np.unique(toggles, return_inverse=True)
    steps = np.bincount(place, np.resize([1, -1], len(toggles)), minlength=len(points))
    inside = np.cumsum(steps) > 0
    return CharSet(points[np.flatnonzero(np.diff(inside, prepend=False))])


ANY_CHAR = CharSet.of((0, 0xD800), (0xE000, CODE_POINTS))
"""Every character that UTF-8 can carry: all code points but the surrogates."""

NOT_NEWLINE = ~CharSet.of((0x0A, 0x0B))
"""What ``.`` matches."""


CLASS_ESCAPES = (r"\w", r"\W", r"\d", r"\D", r"\s", r"\S")


@functools.cache
def python_class(escape: str) -> CharSet:
    """The characters that ``escape`` (one of ``CLASS_ESCAPES``) matches in a Python string pattern."""
    if escape.isupper():
        return ~python_class(escape.lower())
    matches = re.finditer(f"{escape}+", _all_code_points())
    return CharSet.of(*(match.span() for match in matches)) & ANY_CHAR


@functools.cache
def _all_code_points() -> str:
    """A string in which index and code point are the same number."""
    return np.arange(CODE_POINTS, dtype="<u4").tobytes().decode("utf-32-le", errors="surrogatepass")
