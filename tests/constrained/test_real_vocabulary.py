"""SmolLM2's 49,152 tokens: the embedded model's."""

from __future__ import annotations

import random
import re
import time
from functools import cache

import pytest

from stages.v0_1_genesis.constrained.fsm_cache import FSMCache
from stages.v0_1_genesis.hf_transformers_utils import Tokenizer, get_tokenizer
from tests.shared.fixtures import model_folder

pytestmark = pytest.mark.slow

PATTERNS = [
    r"\d{3}-\d{4}",
    r"[\w.]{1,9}@[\w.]{1,9}\.(com|org)",
    r"\w{1,64}",
    r".{1000}",
    r"(\d{1,3}\.){3}\d{1,3}",
    r'\{"name": "[^"\\\n]{1,40}", "age": [1-9]\d{0,2}\}',
    r"[😀-🙏]{1,4}",
    r"[α-ωά-ώ]+|[\u4e00-\u9fff]{2,5}",
    r"(yes|no|maybe so)\.?",
    r"[^\x00-\x7f]{1,10}",
    r"\s*",
    r"(\w{1,30} ){5}",
]


@cache
def engine_side() -> tuple[Tokenizer, FSMCache]:
    tokenizer = get_tokenizer(str(model_folder("smollm2")))
    return tokenizer, FSMCache(tokenizer, 49152)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_walks_match_and_steps_are_cheap(pattern: str) -> None:
    tokenizer, cache = engine_side()
    rng = random.Random(pattern)
    started = time.process_time()
    fsm = cache.get(pattern)
    assert time.process_time() - started < 1.0
    matches = 0
    for _ in range(4):
        state = fsm.start
        output: list[int] = []
        while len(output) < 1000:
            allowed = fsm.allowed_token_ids(state)
            ends = sorted(tokenizer.eos_token_ids & set(allowed.tolist()))
            assert bool(ends) == fsm.is_final(state) and len(allowed)
            token = ends[0] if ends and rng.random() < 0.5 else int(rng.choice(allowed))
            if token in ends:
                matches += 1
                assert re.fullmatch(pattern, tokenizer.decode(output))
                break
            output.append(token)
            state = fsm.next_state(state, token)
    assert matches


def test_mask_and_moves_agree_on_every_token() -> None:
    _, cache = engine_side()
    fsm = cache.get(r'"[\w 中🤗]{1,5}"|\d+')
    state, rng = fsm.start, random.Random(0)
    for _ in range(4):
        allowed = fsm.allowed_token_ids(state).tolist()
        assert allowed == [token for token in range(49152) if fsm.next_state(state, token).node]
        state = fsm.next_state(state, rng.choice(allowed[1:]))
