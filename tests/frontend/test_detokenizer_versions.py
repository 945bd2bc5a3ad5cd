"""Outputs that are tokenized anew: the detokenizer goes on from the text that stands."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.v0_2_cudagraph.hf_transformers_utils import Tokenizer, get_tokenizer
from stages.v0_2_cudagraph.managers.detokenizer_manager import DetokenizerManager
from stages.v0_2_cudagraph.managers.io_struct import BatchStrOut, BatchTokenIDOut

from .tiny_tokenizers import write_folder

END = {"type": "length", "length": 1}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return get_tokenizer(str(write_folder(tmp_path_factory.mktemp("model"))))


def push(
    manager: DetokenizerManager,
    tokens: list[int],
    vid: int = 0,
    text: str = "",
    reason: dict[str, Any] | None = None,
    stops: tuple[str, ...] = (),
    skip: bool = True,
) -> str:
    answer = manager.handle(
        BatchTokenIDOut(["r"], [vid], [text], [tokens], [[*stops]], [skip], [{}], [None], [reason])
    )
    return answer.output_strs[0] if isinstance(answer, BatchStrOut) else ""


def test_an_unfinished_character_is_dropped_with_its_version(tokenizer: Tokenizer) -> None:
    manager, emoji = DetokenizerManager(tokenizer), tokenizer.encode("🎉")
    assert push(manager, [*tokenizer.encode("the"), *emoji[:-1]]) == "the"
    assert push(manager, emoji[:1], vid=1, text="🎉!") == "🎉!"
    assert push(manager, emoji[1:], vid=1, reason=END) == "🎉"


def test_the_same_version_twice_begins_once(tokenizer: Tokenizer) -> None:
    manager = DetokenizerManager(tokenizer)
    push(manager, [], vid=3, text="the ")
    assert push(manager, tokenizer.encode("dog"), vid=3, reason=END) == "dog"
    assert manager.decode_status == {}


def test_a_first_message_may_be_of_a_later_version(tokenizer: Tokenizer) -> None:
    """An answer that is not streamed is one message, whatever happened before."""
    manager = DetokenizerManager(tokenizer)
    assert push(manager, tokenizer.encode("dog"), vid=2, text="the ", reason=END) == "the dog"


@pytest.mark.parametrize("stops", [("dog",), ("zz", "e dog"), ("k dog!",)])
def test_stop_strings_reach_over_versions(tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
    manager = DetokenizerManager(tokenizer)
    shown = push(manager, tokenizer.encode("the d"), stops=stops)
    shown += push(manager, tokenizer.encode("g!"), vid=1, text="o", reason=END, stops=stops)
    whole = "the dog!"
    assert shown == whole[: min([whole.find(stop) for stop in stops if stop in whole], default=len(whole))]


def test_special_tokens_show_in_every_version_alike(tokenizer: Tokenizer) -> None:
    special = min(tokenizer.special_token_ids)
    for skip, name in ((True, ""), (False, "<|endoftext|>")):
        manager = DetokenizerManager(tokenizer)
        assert push(manager, [special], skip=skip) == name
        assert push(manager, [special], vid=1, text="x", skip=skip, reason=END) == "x" + name


@given(data=st.data())
def test_inv_text_versions_at_any_place(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Tokens, then a version that begins with text that the tokens may have begun: the whole text, once."""
    manager, shown, whole = DetokenizerManager(tokenizer), "", ""
    versions = data.draw(st.lists(st.text("abé中🤗 !", min_size=1, max_size=6), min_size=1, max_size=4))
    for vid, text in enumerate(versions):
        forced = text[: data.draw(st.integers(0, len(text)))] if vid else ""
        generated = tokenizer.encode(text[len(forced) :])
        shown += push(manager, generated[:1], vid, forced, stops=("!!",))
        shown += push(manager, generated[1:], vid, stops=("!!",))
        whole += text
        if vid + 1 < len(versions):  # a part of the character that comes next
            begun = tokenizer.encode("🎉")[: data.draw(st.integers(0, 2))]
            shown += push(manager, begun, vid, stops=("!!",))
        assert whole.startswith(shown)
    shown += push(manager, [], len(versions) - 1, reason=END, stops=("!!",))
    assert shown == whole[: whole.find("!!") if "!!" in whole else len(whole)]
