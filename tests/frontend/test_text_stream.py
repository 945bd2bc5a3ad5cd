"""Text streams (INV-TEXT): whole characters only, stop strings cut once, nothing lost, however cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from stages.v0_1_genesis.hf_transformers_utils import Tokenizer, get_tokenizer
from stages.v0_1_genesis.support.text_stream import IncrementalDetokenizer, StopStringFilter

from . import tiny_tokenizers

PROBES = ["é", "中文", "🤗", "👩‍👩‍👧", "नमस्ते", "the quick 🤗 fox"]
REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return get_tokenizer(str(tiny_tokenizers.write_folder(tmp_path_factory.mktemp("model"))))


def load(raw: RawTokenizer, folder: Path) -> Tokenizer:
    raw.save(str(folder / "tokenizer.json"))
    return get_tokenizer(str(folder))


@pytest.mark.parametrize("text", PROBES)
def test_b01_streams_show_whole_characters_only(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    stream = IncrementalDetokenizer(tokenizer)
    pieces = [stream.push([token_id]) for token_id in ids]
    assert "".join(pieces) + stream.flush() == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("text", PROBES)
def test_b01_stopping_after_any_prefix_keeps_every_whole_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    for length in range(len(ids) + 1):
        stream = IncrementalDetokenizer(tokenizer)
        shown = stream.push(ids[:length])
        whole = b"".join(tokenizer.token_bytes(i) for i in ids[:length]).decode("utf-8", errors="ignore")
        assert shown == whole
        assert (shown + stream.flush()).rstrip(REPLACEMENT) == whole


@given(data=st.data(), skip=st.booleans())
def test_any_ids_in_any_cuts_decode_as_the_tokenizers_library_does(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 20), max_size=30))
    stream, text, rest = IncrementalDetokenizer(tokenizer, skip), "", ids
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        text, rest = text + stream.push(rest[:cut]), rest[cut:]
    text += stream.flush()
    assert text == tokenizer.decode(ids, skip) == tokenizer._tokenizer.decode(ids, skip_special_tokens=skip)


def test_bytes_that_never_become_a_character_do_not_hold_back_what_follows(tokenizer: Tokenizer) -> None:
    stray = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xff")
    stream = IncrementalDetokenizer(tokenizer)
    assert [stream.push([stray]) for _ in range(3)] == [REPLACEMENT] * 3
    assert stream.push(tokenizer.encode("the")) == "the"


def test_sentencepiece_keeps_the_leading_space_and_joins_byte_tokens(tmp_path: Path) -> None:
    tokenizer = load(tiny_tokenizers.sentencepiece(), tmp_path)
    ids = tokenizer.encode("the dog 🤗é中")
    assert tokenizer.decode(ids) == " the dog 🤗é中"
    stream = IncrementalDetokenizer(tokenizer)
    pieces = [stream.push([token_id]) for token_id in ids]
    assert "".join(pieces) == " the dog 🤗é中"
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_other_kinds_of_tokenizer_are_probed(tmp_path: Path) -> None:
    tokenizer = load(tiny_tokenizers.word_pieces(), tmp_path)
    assert tokenizer.decode(tokenizer.encode("hello worlds")) == " hello worlds"


def test_special_tokens_show_only_when_asked(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>b<plain é>")
    assert tokenizer.decode(ids) == "ab<plain é>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b<plain é>"


def expected_cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition, by brute force over the whole text."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[:start], stop


SHORT_TEXT = st.text(alphabet="ab", max_size=24)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


@given(data=st.data(), text=SHORT_TEXT, stops=STOPS)
def test_b02_stop_strings_cut_before_the_first_occurrence(
    data: st.DataObject, text: str, stops: list[str]
) -> None:
    stop_filter, shown, rest = StopStringFilter(stops), "", text
    cut_text, stop = expected_cut(text, stops)
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        shown, rest = shown + stop_filter.push(rest[:size]), rest[size:]
        assert cut_text.startswith(shown), "something was shown that a stop string takes back"
    assert (shown + stop_filter.flush(), stop_filter.matched) == (cut_text, stop)
    assert stop_filter.push("more") == stop_filter.flush() == "" or stop is None


@given(text=SHORT_TEXT, stops=STOPS)
def test_a_character_is_held_back_only_while_it_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    stop_filter = StopStringFilter(stops)
    shown = "".join(stop_filter.push(character) for character in text)
    if stop_filter.matched is None:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held[:1]) for stop in stops)
        assert len(held) < 2 * max(map(len, stops), default=1)


def test_b02_text_held_for_a_stop_that_never_completes_comes_out_at_the_end() -> None:
    stop_filter = StopStringFilter(["end\u0001"])
    assert stop_filter.push("the end") == "the "
    assert stop_filter.flush() == "end"
    assert stop_filter.matched is None


def test_b02_of_two_stops_where_one_begins_the_other_the_shorter_matches() -> None:
    for pieces in (["x ab", "c"], ["x abc"], list("x abc")):
        stop_filter = StopStringFilter(["abc", "ab"])
        assert "".join(stop_filter.push(piece) for piece in pieces) == "x "
        assert stop_filter.matched == "ab"


def test_a_long_stop_that_began_first_wins_over_a_short_one_inside_it() -> None:
    stop_filter = StopStringFilter(["abcd", "bc"])
    assert stop_filter.push("xabc") == "x"
    assert stop_filter.matched is None  # "abcd" may still complete
    stop_filter.push("d")
    assert stop_filter.matched == "abcd"
    other = StopStringFilter(["abcd", "bc"])
    assert other.push("xabc") + other.push("e") == "xa"
    assert other.matched == "bc"
