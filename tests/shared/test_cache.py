"""The prefix cache as a request sees it: INV-ONE, full hits, partial hits, flush, and NaN in free slots."""

from __future__ import annotations

import pytest

from strata.adapters import DIALECTS, Engine

from .driving import Answer, collect, greedy, prompt, run, solo
from .fixtures import EngineFactory, model_folder, reset
from .reference import reference


@pytest.mark.needs("radix_cache")
@pytest.mark.parametrize("length", [1, 2, 16, 32, 48, 256])
def test_full_hit(engines: EngineFactory, stage: str, length: int) -> None:
    """Probe B18, INV-ONE: a whole prompt in the cache still computes its last token, and answers the same."""
    engine, ids = engines(stage), prompt(length, seed=10)
    cold, warm = solo(engine, ids, greedy(8)), solo(engine, ids, greedy(8))
    assert cold.meta["cached_tokens"] == 0
    assert warm.meta["cached_tokens"] == length - 1
    assert warm.ids == cold.ids
    if length > 1:
        prefix = solo(engine, ids[:-1], greedy(8))
        assert prefix.meta["cached_tokens"] == length - 2
        reference(model_folder("llama")).assert_greedy(ids[:-1], prefix.ids)
    longer = [*ids, 77]
    answer = solo(engine, longer, greedy(8))
    assert answer.meta["cached_tokens"] == length
    reference(model_folder("llama")).assert_greedy(longer, answer.ids)


@pytest.mark.needs("radix_cache")
def test_answers_are_cached_too(engines: EngineFactory, stage: str) -> None:
    """A second turn of a conversation finds prompt and answer, but for the last token of the answer."""
    engine, ids = engines(stage), prompt(40, seed=11)
    first = solo(engine, ids, greedy(20))
    second = solo(engine, [*ids, *first.ids, *prompt(5, seed=12)], greedy(8))
    assert second.meta["cached_tokens"] == 40 + 20 - 1
    reference(model_folder("llama")).assert_greedy([*ids, *first.ids, *prompt(5, seed=12)], second.ids)


def test_without_cache(engines: EngineFactory, stage: str) -> None:
    engine, ids = engines(stage, **dict(DIALECTS[stage].no_cache_args)), prompt(40, seed=13)
    cold, again = solo(engine, ids, greedy(8)), solo(engine, ids, greedy(8))
    assert again.meta["cached_tokens"] == 0
    assert again.ids == cold.ids
    state = engine.state()
    assert state.free == state.size and not state.tree_slots


@pytest.mark.needs("radix_cache")
def test_flush(engines: EngineFactory, stage: str) -> None:
    engine, ids = engines(stage), prompt(40, seed=14)
    solo(engine, ids, greedy(8))
    assert engine.state().tree_slots
    engine.flush()
    engine.step()
    state = engine.state()
    assert state.free == state.size and not state.tree_slots and state.evictable == 0
    assert solo(engine, ids, greedy(8)).meta["cached_tokens"] == 0


@pytest.mark.needs("radix_cache")
def test_flush_is_refused_while_requests_run(engines: EngineFactory, stage: str) -> None:
    engine, ids = engines(stage), prompt(40, seed=15)
    expected = solo(engine, ids, greedy(12)).ids
    rid = engine.add(ids, greedy(12))
    answers = collect(engine.step())
    engine.flush()
    run(engine, answers)
    assert answers[rid].ids == expected


@pytest.mark.needs("radix_cache")
def test_eviction_makes_room(engines: EngineFactory, stage: str) -> None:
    """Far more distinct prompts than the pool holds: the oldest go, the newest stay."""
    engine = engines(stage, max_total_tokens=256)
    for seed in range(20):
        solo(engine, prompt(60, seed), greedy(4))
    assert solo(engine, prompt(60, 19), greedy(4)).meta["cached_tokens"] == 59
    assert solo(engine, prompt(60, 0), greedy(4)).meta["cached_tokens"] == 0


def poison_free_slots(engine: Engine) -> None:
    free = sorted(engine.state().free_slots)
    pool = engine.runner.token_to_kv_pool
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[free] = float("nan")


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.needs("cuda_graph"))])
def test_nan_in_free_slots_changes_nothing(engines: EngineFactory, stage: str, graphs: bool) -> None:
    """INV-NAN: no gather lets a slot that belongs to nobody reach a result, nor a padded row's into another."""
    graph_args = dict(DIALECTS[stage].graph_args) if graphs else {}
    engine, oracle = engines(stage, max_total_tokens=700, **graph_args), reference(model_folder("llama"))
    prompts = [prompt(length, seed=16) for length in (1, 9, 40, 150)]
    prompts.append(prompts[3][:100] + prompt(7, seed=17))
    # Long requests first: their rows keep stale slots, which are nobody's once the tree has been emptied.
    for seed in range(6):
        engine.add(prompt(100, seed), greedy(2))
    run(engine)
    assert reset(engine)
    rids: dict[str, list[int]] = {}
    answers: dict[str, Answer] = {}
    try:
        for ids in [*prompts, *prompts]:
            rids[engine.add(ids, greedy(9))] = ids
            for _ in range(3):
                poison_free_slots(engine)
                collect(engine.step(), answers)
        while engine.state().running or engine.state().waiting:
            poison_free_slots(engine)
            collect(engine.step(), answers)
    finally:
        for buffer in (*engine.runner.token_to_kv_pool.k_buffer, *engine.runner.token_to_kv_pool.v_buffer):
            buffer.nan_to_num_(0.0)
    for rid, ids in rids.items():
        assert len(answers[rid].ids) == 9
        oracle.assert_greedy(ids, answers[rid].ids)
