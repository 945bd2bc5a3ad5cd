"""The same promise over the kinds of tokenizer that model folders carry, read as the server reads them."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from stages.v0_1_genesis.constrained.fsm_cache import FSMCache
from stages.v0_1_genesis.hf_transformers_utils import Tokenizer, get_tokenizer
from stages.v0_1_genesis.support.text_stream import IncrementalDetokenizer
from tests.frontend import tiny_tokenizers

PATTERNS = [
    "the dog",
    " the dog",
    r"( the| dog|s){1,9}",
    r"\w{5}",
    "[é中🤗]{4}",
    r".{9}",
    r"<plain é>\d",
    r"\s{2}\S{2}",
]
MODEL_VOCABULARY = 512
"""Rows of the model's embedding, more than any of these tokenizers has."""


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    eos = {"byte_level": "<|im_end|>", "sentencepiece": "</s>"}[request.param]
    folder = tiny_tokenizers.write_folder(tmp_path, {"eos_token_id": None}, eos_token=eos)
    text = getattr(tiny_tokenizers, request.param)().to_str()
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    return get_tokenizer(str(folder))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_walks_match_what_the_detokenizer_shows(tokenizer: Tokenizer, pattern: str) -> None:
    fsm, rng = FSMCache(tokenizer, MODEL_VOCABULARY).get(pattern), random.Random(pattern)
    for _ in range(10):
        state = fsm.start
        output: list[int] = []
        while not (fsm.is_final(state) and (rng.random() < 0.5 or len(fsm.allowed_token_ids(state)) == 1)):
            allowed = fsm.allowed_token_ids(state).tolist()
            output.append(rng.choice([i for i in allowed if i not in tokenizer.eos_token_ids]))
            state = fsm.next_state(state, output[-1])
        detokenizer = IncrementalDetokenizer(tokenizer)
        shown = "".join(detokenizer.push([token_id]) for token_id in output) + detokenizer.flush()
        assert re.fullmatch(pattern, shown)
        assert shown == tokenizer.decode(output)


def test_end_tokens_and_special_tokens(tokenizer: Tokenizer) -> None:
    fsm = FSMCache(tokenizer, MODEL_VOCABULARY).get(".*")
    allowed = set(fsm.allowed_token_ids(fsm.start).tolist())
    assert allowed & tokenizer.special_token_ids == tokenizer.eos_token_ids
    assert max(allowed) < tokenizer.vocab_size
