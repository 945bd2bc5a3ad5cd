"""Decoding by replay, as an `Engine` shows it: what is replayed, that the text stays, that padding harms nobody."""

from __future__ import annotations

import pytest

from strata.adapters import DIALECTS, Engine

from .driving import greedy, prompt, run
from .fixtures import EngineFactory, model_folder
from .reference import reference

pytestmark = pytest.mark.needs("cuda_graph")


@pytest.fixture
def engine(engines: EngineFactory, stage: str) -> Engine:
    return engines(stage, **dict(DIALECTS[stage].graph_args))


def replays(engine: Engine) -> tuple[int, int]:
    return int(engine.counters["graph_replays"]), int(engine.counters["decode_steps"])


def test_every_decode_step_is_a_replay_and_the_text_is_the_reference(engine: Engine) -> None:
    prompts = {engine.add(ids := prompt(3 + 7 * i, seed=i), greedy(4 + 3 * i)): ids for i in range(7)}
    before = replays(engine)
    answers = run(engine)
    done = [after - start for after, start in zip(replays(engine), before, strict=True)]
    assert done[0] == done[1] > 0
    for rid, ids in prompts.items():
        reference(model_folder("llama")).assert_greedy(ids, answers[rid].all_ids)


def test_a_batch_above_the_largest_size_is_not_replayed(engine: Engine) -> None:
    for i in range(161):
        engine.add(prompt(2 + i % 5, seed=i), greedy(2))
    before = replays(engine)
    run(engine)
    after = replays(engine)
    assert after[0] == before[0] and after[1] > before[1]


@pytest.mark.needs("regex")
def test_constrained_batches_are_replayed_too(engine: Engine) -> None:
    before = replays(engine)
    rid = engine.add(prompt(5), {"temperature": 0.0, "max_new_tokens": 30, "regex": "[ab]{20}"})
    other = engine.add(prompt(9), greedy(30))
    answers = run(engine)
    assert len(answers[other].ids) == 30 and answers[rid].finish is not None
    after = replays(engine)
    assert after[0] - before[0] == after[1] - before[1] > 0


@pytest.mark.needs("retraction")
def test_retracted_requests_are_replayed_on(engine: Engine) -> None:
    prompts = {engine.add(ids := prompt(20, seed=i), greedy(24)): ids for i in range(5)}
    engine.step()
    engine.force("retract")
    answers = run(engine)
    assert engine.counters["retractions"] > 0
    for rid, ids in prompts.items():
        reference(model_folder("llama")).assert_greedy(ids, answers[rid].all_ids)


def test_padding_writes_to_slot_zero_alone(engine: Engine) -> None:
    """INV-PAD: what a step of five in a graph of eight changes in the pool is slot 0 and five others at most."""
    for i in range(5):
        engine.add(prompt(6, seed=i), greedy(6))
    engine.step()
    pool = engine.runner.token_to_kv_pool
    for _ in range(4):
        before = pool.k_buffer[0].clone()
        used = {slot for request in engine.state().requests for slot in request.slots}
        engine.step()
        changed = set((pool.k_buffer[0] != before).flatten(1).any(dim=1).nonzero().flatten().tolist())
        new = {slot for request in engine.state().requests for slot in request.slots} - used
        assert changed - {0} <= new, "a slot changed that no request got in this step"
    run(engine)
