"""The detokenizer keeps one decoder per live request, none for others, and survives batches that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.v0_1_genesis.hf_transformers_utils import Tokenizer, get_tokenizer
from stages.v0_1_genesis.managers import detokenizer_manager
from stages.v0_1_genesis.managers.detokenizer_manager import DetokenizerManager
from stages.v0_1_genesis.managers.io_struct import BatchStrOut, BatchTokenIDOut, ControlOut

from .tiny_tokenizers import write_folder

END = {"type": "length", "length": 1}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return get_tokenizer(str(write_folder(tmp_path_factory.mktemp("model"))))


@pytest.fixture
def manager(tokenizer: Tokenizer) -> DetokenizerManager:
    return DetokenizerManager(tokenizer)


def batch(
    *entries: tuple[str, list[int], dict[str, Any] | None], stops: tuple[str, ...] = ()
) -> BatchTokenIDOut:
    count = len(entries)
    return BatchTokenIDOut(
        rids=[rid for rid, _, _ in entries],
        output_tokens=[tokens for _, tokens, _ in entries],
        stop_strs=[list(stops)] * count,
        skip_special_tokens=[True] * count,
        meta_info=[{"n": rid} for rid, _, _ in entries],
        finish_reason=[reason for _, _, reason in entries],
    )


def encode(manager: DetokenizerManager, text: str) -> list[int]:
    return manager._tokenizer.encode(text)


def test_each_request_has_its_own_text_and_is_forgotten_at_its_end(manager: DetokenizerManager) -> None:
    emoji = encode(manager, "🤗")
    first = manager.handle(batch(("a", encode(manager, "the"), None), ("b", emoji[:1], None)))
    # "b" has no whole character yet, so main hears nothing of it.
    assert first == BatchStrOut(["a"], ["the"], [{"n": "a"}], [None])
    assert set(manager.decode_status) == {"a", "b"}
    second = manager.handle(batch(("b", emoji[1:], END), ("a", [], END)))
    assert second == BatchStrOut(["b", "a"], ["🤗", ""], [{"n": "b"}, {"n": "a"}], [END, END])
    assert manager.decode_status == {}


def test_an_output_that_ends_inside_a_character_shows_the_rest_at_the_end(
    manager: DetokenizerManager,
) -> None:
    emoji = encode(manager, "🤗")
    answer = manager.handle(batch(("a", emoji[:-1], END)))
    assert isinstance(answer, BatchStrOut)
    assert answer.output_strs == ["\ufffd"]


def test_an_aborted_request_is_forgotten(manager: DetokenizerManager) -> None:
    manager.handle(batch(("a", encode(manager, "the"), None)))
    manager.handle(batch(("a", [], {"type": "abort", "message": "gone"})))
    assert manager.decode_status == {}


def test_text_held_for_a_stop_string_comes_out_at_the_end(manager: DetokenizerManager) -> None:
    ids = encode(manager, "the dog")
    assert manager.handle(batch(("a", ids, None), stops=("dog!",))) == BatchStrOut(
        ["a"], ["the "], [{"n": "a"}], [None]
    )
    assert manager.handle(batch(("a", [], END), stops=("dog!",))) == BatchStrOut(
        ["a"], ["dog"], [{"n": "a"}], [END]
    )


def test_answers_to_control_requests_pass_unchanged(manager: DetokenizerManager) -> None:
    message = ControlOut("r", {"free": 3})
    assert manager.handle(message) is message


def test_batches_that_do_not_fit_together_and_ids_of_no_token_do_no_harm(manager: DetokenizerManager) -> None:
    uneven = batch(("a", [1], None), ("b", [1], None))
    uneven.finish_reason.pop()
    assert manager.handle(uneven) is None
    odd = manager.handle(batch(("c", [-1, 10**9, 10**30, *encode(manager, "the")], END)))
    assert isinstance(odd, BatchStrOut)
    assert odd.output_strs == ["the"]


def test_the_number_of_decoders_is_bounded(
    manager: DetokenizerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detokenizer_manager, "MAX_LIVE_REQUESTS", 3)
    for i in range(10):
        manager.handle(batch((str(i), [1], None)))
    assert list(manager.decode_status) == ["7", "8", "9"]


@given(data=st.data())
def test_inv_text_any_interleaving_of_requests_gives_each_its_whole_text(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    manager = DetokenizerManager(tokenizer)
    texts = data.draw(st.lists(st.text(alphabet="abé中🤗 !", max_size=12), min_size=1, max_size=4))
    left = {str(i): encode(manager, text) for i, text in enumerate(texts)}
    shown = dict.fromkeys(left, "")
    while left:
        entries: list[tuple[str, list[int], dict[str, Any] | None]] = []
        for rid in data.draw(st.lists(st.sampled_from(sorted(left)), unique=True, min_size=1)):
            size = data.draw(st.integers(min(1, len(left[rid])), len(left[rid])))
            piece, left[rid] = left[rid][:size], left[rid][size:]
            entries.append((rid, piece, None if left[rid] else END))
        answer = manager.handle(batch(*entries, stops=("!!", "a中")))
        if isinstance(answer, BatchStrOut):
            for rid, text in zip(answer.rids, answer.output_strs, strict=True):
                shown[rid] += text
        left = {rid: ids for rid, ids in left.items() if ids}
    assert manager.decode_status == {}
    for rid, text in shown.items():
        whole = texts[int(rid)]
        assert text == whole[: min([whole.find(s) for s in ("!!", "a中") if s in whole], default=len(whole))]
