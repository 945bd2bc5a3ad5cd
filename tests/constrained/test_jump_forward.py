"""Forced paths against brute force over `re`: the characters that every match goes on with."""

from __future__ import annotations

import functools
import itertools
import re
from array import array
from re import _parser  # type: ignore[attr-defined]

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from stages.v0_2_cudagraph.constrained.fsm import START, RegexFSM, RegexState
from stages.v0_2_cudagraph.constrained.fsm_cache import FSMCache
from stages.v0_2_cudagraph.constrained.jump_forward import (
    MAX_FORCED_CHARS,
    JumpForwardCache,
    JumpForwardMap,
)
from stages.v0_2_cudagraph.constrained.regex_index import RegexIndex

from .vocabularies import ALL_BYTES, byte_level, of

LETTERS = "ab1é"
MAX_LENGTH = 5
WORDS = ["".join(word) for n in range(MAX_LENGTH + 1) for word in itertools.product(LETTERS, repeat=n)]


@functools.cache
def fsm_cache() -> FSMCache:
    return FSMCache(byte_level(), len(byte_level().tokens))


def automaton(pattern: str) -> tuple[RegexFSM, JumpForwardMap]:
    fsm = fsm_cache().get(pattern)
    return fsm, JumpForwardMap(fsm.index)


def state_after(fsm: RegexFSM, text: str | bytes) -> RegexState:
    state = START
    for byte in text.encode() if isinstance(text, str) else text:
        state = fsm.next_state(state, *byte_level().ids(bytes([byte])))
    return state


def forced(pattern: str, before: str | bytes = "") -> str:
    fsm, jump_map = automaton(pattern)
    return jump_map.forced_path(state_after(fsm, before)).text


# -- brute force ---------------------------------------------------------------------------------------------

atoms = st.sampled_from([*LETTERS, "[ab]", "[1é]", "[^a]", ".", r"\w", r"\d", ""])


def compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    parts = st.lists(inner, min_size=1, max_size=4)
    return (
        parts.map("".join)
        | parts.map(lambda branches: f"({'|'.join(branches)})")
        | st.tuples(inner, st.sampled_from(["?", "{2}", "{1,2}", "*", "+"])).map(lambda t: f"({t[0]}){t[1]}")
    )


patterns = st.recursive(atoms, compound, max_leaves=7)


def going_on(words: list[str], before: str) -> tuple[str, bool]:
    """What all of ``words`` go on with behind ``before``, a prefix of each, and whether one ends there."""
    path = ""
    while True:
        here = before + path
        follow = {word[len(here)] if len(word) > len(here) else "" for word in words}
        if len(follow) != 1 or follow == {""}:
            return path, "" in follow
        path += follow.pop()


@settings(max_examples=100)
@given(patterns)
@example("a|ab")
@example("ab(ab)*1")
@example("(a|b)1é{2}")
@example("a*")
def test_forced_is_what_every_match_goes_on_with(pattern: str) -> None:
    """Exactly, where all matches were looked at; where some are too long, nothing that a match contradicts."""
    matches = [word for word in WORDS if re.fullmatch(pattern, word)]
    assume(matches)
    fsm, jump_map = automaton(pattern)
    is_whole = _parser.parse(pattern).getwidth()[1] <= MAX_LENGTH
    names_others = re.search(r"[.\\^]", pattern)  # classes with characters that no word has
    for before in {word[:n] for word in matches for n in range(min(len(word), 3) + 1)}:
        words = [word for word in matches if word.startswith(before)]
        path, _ = going_on(words, before)
        found = jump_map.forced_path(state_after(fsm, before))
        if is_whole and not names_others:
            assert found.text == path, (pattern, before)
        assert all((before + found.text).startswith(word[: len(before + found.text)]) for word in words)
        if fsm.is_final(state_after(fsm, before)):
            assert found.text == ""
        assert found.state == state_after(fsm, before + found.text)


# -- examples --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "before", "path"),
    [
        (r'\{"name": "\w+"\}', "", '{"name": "'),
        (r'\{"name": "\w+"\}', '{"name": "x', ""),
        (r'\{"name": "\w+"\}', '{"name": "x"', "}"),
        ("naïve 漢字 🎉!", "", "naïve 漢字 🎉!"),
        ("(yes|yesterday)", "", "yes"),
        ("(yes|yesterday)", "yest", "erday"),
        ("yes|no", "", ""),
        ("yes|no", "n", "o"),
        ("[a]b", "", "ab"),
        ("[ab]c", "", ""),
        ("()", "", ""),
        ("a?b", "", ""),
        ("a{3}b{2}", "a", "aabb"),
        ("(?:ab){2}", "", "abab"),
    ],
)
def test_examples(pattern: str, before: str, path: str) -> None:
    assert forced(pattern, before) == path


def test_an_end_that_is_possible_is_a_choice() -> None:
    """#1084: history's paths ran through final states, and round and round."""
    for pattern, before in (("(ab)*", ""), ("(ab)+", "ab"), ("a+", "a"), ("ab?", "a"), ("(the )+", "the ")):
        assert forced(pattern, before) == ""
    assert forced("(ab)*", "a") == "b"


def test_an_unfinished_character_is_whole_in_the_path() -> None:
    assert forced("x🎉y", b"x\xf0\x9f") == "🎉y"
    assert forced("(🎉|🎊)y", b"\xf0\x9f\x8e") == "", "two characters begin so"
    assert forced("(é|漢)y", "é".encode()[:1]) == "", "its bytes decide, but not yet the characters"


def test_what_no_token_spells_is_no_choice() -> None:
    vocabulary = of(*(byte for byte in ALL_BYTES if byte != b"\x04"))
    fsm = FSMCache(vocabulary, len(vocabulary.tokens)).get("a[\x04b]c")
    assert JumpForwardMap(fsm.index).forced_path(START).text == "abc"


def test_a_long_path_is_cut() -> None:
    fsm, jump_map = automaton("a{3000}b")
    path = jump_map.forced_path(START)
    assert path.text == "a" * MAX_FORCED_CHARS
    assert path.state == state_after(fsm, path.text)
    assert jump_map.forced_path(path.state).text == "a" * MAX_FORCED_CHARS


def test_a_path_without_an_end_is_cut() -> None:
    """No compiled regex has one, since all states reach an end; a table that has is walked no further."""
    starts, letters = np.array([0, 97, 98], np.int32), np.array([1, 0, 1], np.uint16)
    cells = array("H", [0, 0, 2, 0, 1, 0])  # 1 -a-> 2 -a-> 1, and no end
    jump_map = JumpForwardMap(RegexIndex(starts.tobytes(), letters.tobytes(), 1, cells.tobytes()))
    assert jump_map.forced_path(START).text == "a" * MAX_FORCED_CHARS


def test_paths_and_maps_are_kept() -> None:
    cache = JumpForwardCache()
    fsm, _ = automaton("abc")
    jump_map = cache.get("abc", fsm.index)
    assert cache.get("abc", fsm.index) is jump_map
    assert jump_map.forced_path(START) is jump_map.forced_path(START)
