"""What the dialect takes, what it refuses, and what it says."""

from __future__ import annotations

import contextlib
import re
import time

import pytest

from stages.v0_1_genesis.constrained.alphabet import spell
from stages.v0_1_genesis.constrained.char_sets import ANY_CHAR, python_class
from stages.v0_1_genesis.constrained.dialect import (
    MAX_DEPTH,
    MAX_LENGTH,
    MAX_POSITIONS,
    RegexError,
    count_positions,
    parse,
)
from stages.v0_1_genesis.constrained.spelling import Spelling

REFUSED = {
    "(?=a)b": "a lookahead",
    "(?!a)b": "a lookahead",
    "a(?<=a)b": "a lookbehind",
    "a(?<!b)b": "a lookbehind",
    r"(a)\1": "a back-reference",
    "(?P<x>a)(?P=x)": "a back-reference",
    "(a)?(?(1)b|c)": "a conditional group",
    "(?>a)b": "an atomic group",
    "a*+b": "a possessive quantifier",
    r"\ba": r"\b (a word boundary)",
    r"a\B": r"\B (a word boundary)",
    "a^b": "^ (an anchor) inside the pattern",
    "(a$)b": "$ (an anchor) inside the pattern",
    r"a\Ab": r"\A (an anchor) inside the pattern",
    r"(a\Z)?": r"\Z (an anchor) inside the pattern",
    "(?i)a": "a flag",
    "(?x) a": "a flag",
    "(?s).": "a flag",
    "(?m)^a": "a flag",
    "(?a)x": "a flag",
    "(?i:a)": "a flag",
    "(?-i:a)": "a flag",
}


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_no_automaton_can_follow_is_refused_by_name(pattern: str) -> None:
    re.compile(pattern)  # a pattern that Python itself takes
    with pytest.raises(RegexError, match=re.escape(REFUSED[pattern])) as caught:
        parse(pattern)
    assert str(caught.value).startswith("regex ") and "\n" not in str(caught.value)


BROKEN = [
    "(",
    ")",
    "[",
    "a**",
    "a{3,1}",
    "*a",
    "(?P<1>a)",
    r"\8",
    "(?z)",
    "[b-a]",
    r"\N{NO SUCH NAME}",
    "\\",
    "(?",
]


@pytest.mark.parametrize("pattern", BROKEN)
def test_a_broken_pattern_says_what_is_wrong(pattern: str) -> None:
    with pytest.raises(RegexError, match="regex is not valid: ") as caught:
        parse(pattern)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "pattern",
    [
        "a" * (MAX_LENGTH + 1),
        f"a{{{MAX_POSITIONS + 1}}}",
        "((a{1,50}){1,50}){1,50}",
        "(" * (MAX_DEPTH + 1) + "a" + ")" * (MAX_DEPTH + 1),
        "(" * 2000 + ")" * 2000,
        "a{99999999999999999999}",
    ],
    ids=lambda pattern: ascii(pattern[:20]),
)
def test_limits_answer_at_once(pattern: str) -> None:
    started = time.process_time()
    with pytest.raises(RegexError) as caught:
        parse(pattern)
    assert time.process_time() - started < 0.5  # of this process alone: a busy machine adds nothing
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "pattern", ["^abc$", r"\Aabc\Z", "(^abc$)", "(?:^abc)$", "^^abc$$", "^(?:(abc))$", "(?P<n>abc)"]
)
def test_outer_anchors_and_groups_say_nothing(pattern: str) -> None:
    assert count_positions(parse(pattern)) == 3


def test_each_branch_may_be_anchored() -> None:
    assert count_positions(parse("^a$|^bc$")) == 3


def test_positions_count_repeats_written_out() -> None:
    assert count_positions(parse(r"\d{3}-(ab){2,4}x*y?(z+)")) == 3 + 1 + 8 + 1 + 1 + 1


@pytest.mark.parametrize("pattern", [r"[^\w\W]", "\ud800", "[\ud800-\udfff]a", r"a|[^\s\S]+"], ids=ascii)
def test_a_class_without_characters_is_refused(pattern: str) -> None:
    with pytest.raises(RegexError, match="class without characters"):
        spell(parse(pattern), Spelling(ANY_CHAR, ANY_CHAR))


@pytest.mark.parametrize(
    "pattern",
    [
        "".join(chr(0x4E00 + 2 * i) for i in range(4000)),
        "".join(rf"[^{chr(0x4E00 + i)}\w]" for i in range(500)),
        "".join(rf"[^{chr(0x4E00 + i)}\w]" for i in range(40)) + r"[a\W]" * 600,
    ],
    ids=["literals", "classes", "repeated"],
)
def test_many_classes_cost_the_main_process_little(pattern: str) -> None:
    python_class(r"\w")
    started = time.process_time()
    with contextlib.suppress(RegexError):
        spell(parse(pattern), Spelling(ANY_CHAR, ANY_CHAR))
    assert time.process_time() - started < 0.5
