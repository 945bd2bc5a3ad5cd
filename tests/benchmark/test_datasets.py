"""The prompts of a run: exact lengths, the same for the same seed, and no special tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.v0_2_cudagraph.benchmark.datasets import (
    Lengths,
    ordinary_ids,
    random_requests,
    shared_prefix_requests,
    sharegpt_requests,
)
from stages.v0_2_cudagraph.hf_transformers_utils import Tokenizer, get_tokenizer
from tests.models.tiny import tiny_llama


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return get_tokenizer(str(tiny_llama("llama")))


@given(st.integers(1, 300), st.floats(0, 1), st.integers(0, 5))
def test_lengths_are_within_their_range(longest: int, ratio: float, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        assert max(1, int(longest * ratio)) <= Lengths(longest, ratio).draw(rng) <= longest


def test_a_ratio_of_one_makes_all_equal() -> None:
    requests = random_requests(random.Random(0), 9, range(50), Lengths(33, 1.0), Lengths(7, 1.0))
    assert {(len(request.prompt_ids), request.output_len) for request in requests} == {(33, 7)}


def test_random_prompts_depend_on_the_seed_alone() -> None:
    first, again, other = (
        random_requests(random.Random(seed), 20, range(10, 90), Lengths(30, 0.0), Lengths(9, 0.5))
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert all(10 <= i < 90 for request in first for i in request.prompt_ids)
    assert {request.output_len for request in first} == set(range(4, 10))
    assert len({tuple(request.prompt_ids) for request in first}) == 20


def test_special_tokens_are_left_out(tokenizer: Tokenizer) -> None:
    assert list(ordinary_ids(384, tokenizer)) == list(range(3, 384))
    assert list(ordinary_ids(400, tokenizer)) == list(range(3, 384)), "rows without a token are no prompts"
    assert list(ordinary_ids(100, tokenizer)) == list(range(3, 100))
    assert ordinary_ids(49152, None) == range(1000, 49152)
    assert ordinary_ids(500, None) == range(250, 500)


def test_shared_prefixes_are_shared_evenly() -> None:
    requests = shared_prefix_requests(
        random.Random(0), 20, range(300), Lengths(10, 1.0), Lengths(5, 1.0), groups=4, prefix_len=50
    )
    prefixes = [tuple(request.prompt_ids[:50]) for request in requests]
    assert len(set(prefixes)) == 4
    assert all(prefixes.count(prefix) == 5 for prefix in prefixes)
    assert len({tuple(request.prompt_ids) for request in requests}) == 20
    assert {len(request.prompt_ids) for request in requests} == {60}
    assert prefixes[:4] != prefixes[4:8], "they come in no order"


def conversation(*turns: str) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": "human", "value": turn} for turn in turns]}


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_sharegpt_takes_the_first_two_turns(tmp_path: Path, tokenizer: Tokenizer) -> None:
    question, answer = "The quick brown fox jumps.", "Over the lazy dog, and then again."
    path = write(tmp_path / "c.json", [conversation(question, answer, "more", "of it")])
    [request] = sharegpt_requests(random.Random(0), 1, path, tokenizer, None)
    assert request.prompt_ids == tokenizer.encode(question)
    assert request.output_len == len(tokenizer.encode(answer))
    [request] = sharegpt_requests(random.Random(0), 1, path, tokenizer, 77)
    assert request.output_len == 77


def test_sharegpt_leaves_out_what_does_not_fit(tmp_path: Path, tokenizer: Tokenizer) -> None:
    fits = conversation("The quick brown fox", "the name of the ship was the Billy of Tea")
    others = [
        conversation("A question without an answer"),
        conversation("Hi", "the name of the ship was the Billy of Tea"),
        conversation("The quick brown fox", "A"),
        conversation("0123456789" * 200, "the name of the ship was the Billy of Tea"),
        conversation("0123456789" * 90, "9876543210" * 200),
        {"conversations": []},
        {"conversations": [{"from": "human"}, {"from": "gpt"}]},
        {},
        "text",
    ]
    path = write(tmp_path / "c.json", [*others, fits])
    [request] = sharegpt_requests(random.Random(3), 1, path, tokenizer, None)
    assert request.prompt_ids == tokenizer.encode("The quick brown fox")
    with pytest.raises(ValueError, match=r"--num-prompts 2: .*c\.json has 1 conversations"):
        sharegpt_requests(random.Random(3), 2, path, tokenizer, None)


@pytest.mark.parametrize(
    ("text", "says"), [("{", "is no JSON"), ("{}", "must hold a list"), (None, "can't be read: No such file")]
)
def test_a_bad_file_is_named(tmp_path: Path, tokenizer: Tokenizer, text: str | None, says: str) -> None:
    path = tmp_path / "c.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"--dataset-path .*{says}"):
        sharegpt_requests(random.Random(0), 1, path, tokenizer, None)
