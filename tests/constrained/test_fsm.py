"""The token automaton against `re.fullmatch`: what it lets through matches, and it lets through all that does."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stages.v0_1_genesis.constrained.dialect import RegexError
from stages.v0_1_genesis.constrained.fsm import DEAD, MAX_MASK_BYTES, RegexFSM
from stages.v0_1_genesis.constrained.logit_mask import mask_logits

from .vocabularies import ALL_BYTES, END, Vocabulary, accepts, byte_level, of

# -- patterns of a grammar ---------------------------------------------------------------------------------

EXAMPLES = 100
"""In each run; a thousand and more were tried when the automaton was written."""

CHARACTERS = "ab1 _-\né中🤗٣ſ"
atoms = st.sampled_from(
    [re.escape(c) for c in CHARACTERS]
    + [
        ".",
        r"\w",
        r"\d",
        r"\s",
        r"\W",
        r"\D",
        r"\S",
        "[ab]",
        "[^a]",
        r"[\w-]",
        r"[^\s1]",
        "[é-中]",
        "[🤗-🤟1]",
        r"\x41",
        "",
    ]
)
quantifiers = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}", "*?", "+?", "??", "{1,2}?"])


def compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    group = st.sampled_from(["({})", "(?:{})"])
    return (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.tuples(group, st.lists(inner, min_size=1, max_size=3)).map(lambda t: t[0].format("|".join(t[1])))
        | st.tuples(group, inner, quantifiers).map(lambda t: t[0].format(t[1]) + t[2])
    )


patterns = st.recursive(atoms, compound, max_leaves=6)
anchored = st.tuples(
    st.sampled_from(["", "^", r"\A"]), patterns.map("(?:{})".format), st.sampled_from(["", "$", r"\Z"])
)
texts = st.text(CHARACTERS + "AQ\t", max_size=6)


@settings(max_examples=EXAMPLES, deadline=None)
@given(patterns, st.lists(texts, min_size=1, max_size=8))
@example("a|ab", ["a", "ab", "b"])
@example("(a|ab)(c|bcd)*?", ["abcd", "ac", "abc", "abbcd"])
@example("", ["", "a"])
@example("a*?b??", ["", "aab", "b", "ba"])
def test_accepts_exactly_what_re_matches(pattern: str, some_texts: list[str]) -> None:
    vocabulary = byte_level()
    fsm = vocabulary.fsm(pattern)
    for text in some_texts:
        assert accepts(fsm, vocabulary, text) == bool(re.fullmatch(pattern, text)), (pattern, text)


@settings(max_examples=EXAMPLES, deadline=None)
@given(anchored.map("".join), st.integers(0, 2**32))
def test_walks_end_in_matches(pattern: str, seed: int) -> None:
    vocabulary, rng = byte_level(), random.Random(seed)
    fsm = vocabulary.fsm(pattern)
    output = walk(fsm, vocabulary, rng, max_tokens=12)
    if output is not None:
        assert re.fullmatch(pattern, vocabulary.decode(output))


def walk(fsm: RegexFSM, vocabulary: Vocabulary, rng: random.Random, max_tokens: int) -> list[int] | None:
    """Follow allowed tokens at random; None if the end did not come. Checks mask and moves at each state."""
    state = fsm.start
    output: list[int] = []
    for _ in range(max_tokens):
        allowed = fsm.allowed_token_ids(state).tolist()
        assert allowed, "a dead end"
        assert (END in allowed) == fsm.is_final(state)
        moves = [i for i in range(len(vocabulary.tokens)) if fsm.next_state(state, i) != DEAD]
        assert allowed == moves
        token = END if END in allowed and rng.random() < 0.4 else rng.choice(allowed)
        if token == END:
            assert fsm.next_state(state, END) == state
            return output
        output.append(token)
        state = fsm.next_state(state, token)
    return None


# -- tokens and bytes --------------------------------------------------------------------------------------


def test_characters_spread_over_tokens() -> None:
    vocabulary = of(*ALL_BYTES, b"\xf0\x9f", b"\xa4\x97", b"\x97!", b" \xe4\xb8", "中", b"a\xf0\x9f\xa4")
    fsm = vocabulary.fsm("🤗!|中+|a🤗")
    [f0, f09f, af] = vocabulary.ids(b"\xf0", b"\xf0\x9f", b"a\xf0\x9f\xa4")
    [e4, a, whole] = vocabulary.ids(b"\xe4", b"a", "中".encode())
    assert set(fsm.allowed_token_ids(fsm.start).tolist()) == {f0, f09f, af, e4, a, whole}
    half = fsm.next_state(fsm.start, f09f)
    assert half.pending == b"\xf0\x9f" and not fsm.is_final(half)
    assert set(fsm.allowed_token_ids(half).tolist()) == set(vocabulary.ids(b"\xa4", b"\xa4\x97"))
    three = fsm.next_state(half, *vocabulary.ids(b"\xa4"))
    assert set(fsm.allowed_token_ids(three).tolist()) == set(vocabulary.ids(b"\x97", b"\x97!"))
    assert fsm.is_final(fsm.next_state(three, *vocabulary.ids(b"\x97!")))


def test_a_space_may_bring_the_beginning_of_a_character() -> None:
    vocabulary = of(*ALL_BYTES, b" \xe4\xb8")
    fsm = vocabulary.fsm(" 中")
    assert vocabulary.ids(b" \xe4\xb8")[0] in fsm.allowed_token_ids(fsm.start)
    other = vocabulary.fsm(" é")
    assert vocabulary.ids(b" \xe4\xb8")[0] not in other.allowed_token_ids(other.start)


def test_tokens_that_are_no_piece_of_a_text_are_never_allowed() -> None:
    vocabulary = of(
        *ALL_BYTES, b"\xff\xfe", b"\xed\xa0", b"a\x80", b"\xc3a", b"\x80\x80\x80\x80", b"\xc0", b"\xf5"
    )
    fsm = vocabulary.fsm("[^x]*")
    bad = vocabulary.ids(b"\xff\xfe", b"\xed\xa0", b"a\x80", b"\xc3a", b"\x80\x80\x80\x80", b"\xc0", b"\xf5")
    assert not set(bad) & set(fsm.allowed_token_ids(fsm.start).tolist())
    pending = fsm.next_state(fsm.start, *vocabulary.ids(b"\xf0"))
    assert not set(bad) & set(fsm.allowed_token_ids(pending).tolist())


def test_overlong_forms_are_no_characters() -> None:
    vocabulary = of(*ALL_BYTES)
    fsm = vocabulary.fsm("[a-z]")
    assert not set(vocabulary.ids(b"\xe0", b"\xc1", b"\xf0")) & set(fsm.allowed_token_ids(fsm.start).tolist())


def test_special_tokens_and_padding_are_never_allowed() -> None:
    vocabulary = of("a", b"")
    fsm = vocabulary.fsm("a*|.*end.*")
    assert fsm.allowed_token_ids(fsm.start).tolist() == [END, 1]
    assert fsm.next_state(fsm.start, 2) == DEAD


def test_tokens_with_the_same_text_are_all_allowed() -> None:
    vocabulary = of("a", "a", "aa")
    fsm = vocabulary.fsm("a")
    assert fsm.allowed_token_ids(fsm.start).tolist() == [1, 2]


# -- what a vocabulary cannot spell ------------------------------------------------------------------------


def test_never_waits_for_a_character_that_no_token_spells() -> None:
    vocabulary = of(*(b for b in ALL_BYTES if b not in (b"\x04", b"\xf1")), "abc")
    assert accepts(vocabulary.fsm("[\x00-\x08]+"), vocabulary, "\x03\x05")
    fsm = vocabulary.fsm("a(\x04|c)|b")
    start_ids = set(fsm.allowed_token_ids(fsm.start).tolist())
    assert start_ids == set(vocabulary.ids(b"a", b"b"))
    fsm = vocabulary.fsm("a\x04|b")
    assert fsm.allowed_token_ids(fsm.start).tolist() == vocabulary.ids(b"b")


@pytest.mark.parametrize("pattern", ["\x04", "a\x04+b", "[\U00040000-\U00050000]"])
def test_an_unspellable_pattern_is_an_error(pattern: str) -> None:
    vocabulary = of(*(b for b in ALL_BYTES if b not in (b"\x04", b"\xf1")))
    with pytest.raises(ValueError, match="regex matches no text that the tokens of this model can spell"):
        vocabulary.fsm(pattern)


def test_a_vocabulary_without_byte_tokens_spells_with_its_characters() -> None:
    vocabulary = of("a", "é", "中", "éa", "b中")
    fsm = vocabulary.fsm(r"\w{2}")
    assert fsm.allowed_token_ids(fsm.start).tolist() == [
        1,
        2,
        3,
        4,
    ]  # no token is "b" alone, so 5 is left out
    assert fsm.allowed_token_ids(fsm.next_state(fsm.start, 1)).tolist() == [1, 2, 3]
    fsm = vocabulary.fsm("b?中")
    assert fsm.allowed_token_ids(fsm.start).tolist() == [3]


def test_a_character_that_is_a_token_needs_no_byte_tokens() -> None:
    """ "中" as one token, no token for its last byte: its first byte must not be offered."""
    vocabulary = of(b"\xe4", b"\xb8", "中", "a")
    fsm = vocabulary.fsm("[a中]{2}")
    assert fsm.allowed_token_ids(fsm.start).tolist() == [3, 4]


# -- masks -------------------------------------------------------------------------------------------------


def test_masks_are_a_bit_a_token_and_bounded() -> None:
    vocabulary = byte_level()
    fsm = vocabulary.fsm(".{300}")
    state = fsm.start
    for _ in range(300):
        bits = fsm.allowed_bits(state)
        assert bits.dtype == np.uint8 and bits.shape == (-(-len(vocabulary.tokens) // 8),)
        state = fsm.next_state(state, *vocabulary.ids(b"a"))
    assert fsm.allowed_token_ids(state).tolist() == [END]
    assert fsm._bits.nbytes <= MAX_MASK_BYTES and len(fsm._bits) == 301
    with pytest.raises(ValueError, match="read-only"):
        fsm.allowed_bits(state)[:] = 0


@pytest.mark.parametrize("rows", [[0, 1, 2], [1], [0, 2]])
def test_masking_writes_no_other_row(rows: list[int]) -> None:
    vocabulary = byte_level()
    fsms = [vocabulary.fsm(pattern) for pattern in (r"\d", "[a-f]+", ".*")]
    logits = torch.randn(3, len(vocabulary.tokens), generator=torch.Generator().manual_seed(0))
    masked = logits.clone()
    mask_logits(masked, rows, [(fsms[row], fsms[row].start) for row in rows])
    for row, fsm in enumerate(fsms):
        allowed = fsm.allowed_token_ids(fsm.start) if row in rows else np.arange(len(vocabulary.tokens))
        expected = torch.full_like(logits[row], -torch.inf)
        expected[allowed] = logits[row, allowed]
        assert torch.equal(masked[row], expected)


def test_equal_patterns_share_an_automaton() -> None:
    cache = byte_level().cache
    assert cache.get("a+") is cache.get("a+")
    with pytest.raises(RegexError):
        cache.get("(")
