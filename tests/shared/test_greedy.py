"""INV-SAME: greedy output equals transformers', whatever the model variant, the lengths and the schedule."""

from __future__ import annotations

import pytest

from strata.adapters import DIALECTS

from .driving import Answer, collect, greedy, prompt, run, solo
from .fixtures import EVERY_TINY_MODEL, EngineFactory, model_folder
from .reference import reference

LENGTHS = [1, 2, 3, 7, 16, 31, 32, 33, 64, 100, 127, 128, 129, 255, 256, 500, 1000]


@pytest.mark.slow
@pytest.mark.parametrize("model", EVERY_TINY_MODEL)
def test_every_variant(engines: EngineFactory, stage: str, model: str) -> None:
    """Solo and together: grouped heads, tied embeddings, rope scaling, biases, shards, old spellings."""
    engine, oracle = engines(stage, model), reference(model_folder(model))
    prompts = [prompt(length, seed=1) for length in (1, 5, 150, 40)]
    rids = {engine.add(ids, greedy(24)): ids for ids in prompts}
    answers = run(engine)
    for rid, ids in rids.items():
        assert len(answers[rid].ids) == 24
        oracle.assert_greedy(ids, answers[rid].ids)
    answer = solo(engine, prompt(300, seed=2), greedy(12))
    oracle.assert_greedy(prompt(300, seed=2), answer.ids)


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length(engines: EngineFactory, stage: str, length: int) -> None:
    engine, oracle = engines(stage), reference(model_folder("llama"))
    answer = solo(engine, prompt(length), greedy(8))
    assert len(answer.ids) == 8
    assert answer.meta["prompt_tokens"] == length
    oracle.assert_greedy(prompt(length), answer.ids)


@pytest.mark.slow
def test_a_long_answer(engines: EngineFactory, stage: str) -> None:
    engine, oracle = engines(stage), reference(model_folder("llama"))
    answer = solo(engine, prompt(20), greedy(600))
    assert len(answer.ids) == 600
    oracle.assert_greedy(prompt(20), answer.ids)


@pytest.mark.parametrize("cached", [True, False], ids=["cache", "no-cache"])
def test_mixed_batch(engines: EngineFactory, stage: str, cached: bool) -> None:
    """Many lengths together, arriving at different times, some sharing prefixes with each other."""
    server_args = {} if cached else dict(DIALECTS[stage].no_cache_args)
    engine, oracle = engines(stage, **server_args), reference(model_folder("llama"))
    shared = prompt(60, seed=3)
    prompts = [prompt(length, seed=4) for length in LENGTHS[:14]]
    prompts += [shared[:cut] + prompt(tail, seed=5) for cut, tail in ((60, 1), (60, 30), (30, 10), (59, 2))]
    rids: dict[str, list[int]] = {}
    answers: dict[str, Answer] = {}
    for wave in range(3):
        for i, ids in enumerate(prompts[wave::3]):
            rids[engine.add(ids, greedy(5 + 3 * i), stream=i % 2 == 0)] = ids
        for _ in range(4):
            collect(engine.step(), answers)
    run(engine, answers)
    for rid, ids in rids.items():
        assert answers[rid].finish == {"type": "length", "length": len(answers[rid].ids)}
        oracle.assert_greedy(ids, answers[rid].ids)


def test_eos_ends_an_answer(engines: EngineFactory, stage: str) -> None:
    """Biased to its end-of-sequence token a request stops there; the token is no part of the output."""
    engine = engines(stage)
    answer = solo(engine, prompt(9), {"temperature": 0.0, "max_new_tokens": 50, "logit_bias": {2: 100.0}})
    assert answer.finish == {"type": "stop", "matched": 2}
    assert answer.ids == []
    answer = solo(engine, prompt(9), greedy(6, logit_bias={2: 100.0}))
    assert answer.finish is not None and answer.finish["type"] == "length"
    assert answer.ids == [2] * 6


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 17, 128, 400, 1000])
def test_smollm2_every_length(engines: EngineFactory, stage: str, length: int) -> None:
    engine, oracle = engines(stage, "smollm2"), reference(model_folder("smollm2"))
    ids = prompt(length, seed=6, vocab=40_000)
    answer = solo(engine, ids, greedy(12))
    assert len(answer.ids) == 12
    oracle.assert_greedy(ids, answer.ids)


@pytest.mark.slow
def test_smollm2_mixed_batch(engines: EngineFactory, stage: str) -> None:
    engine, oracle = engines(stage, "smollm2"), reference(model_folder("smollm2"))
    prompts = [prompt(length, seed=7, vocab=40_000) for length in (1, 3, 30, 90, 200, 333)]
    rids = {engine.add(ids, greedy(4 + 4 * i)): ids for i, ids in enumerate(prompts)}
    answers = run(engine)
    for rid, ids in rids.items():
        oracle.assert_greedy(ids, answers[rid].ids)
