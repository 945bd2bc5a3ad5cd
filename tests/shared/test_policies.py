"""In which order waiting requests are served, seen from outside: one runs at a time, so they end in order."""

from __future__ import annotations

import pytest

from strata.adapters import DIALECTS, Engine

from .driving import greedy, prompt, run, solo
from .fixtures import EngineFactory

A, B, C = (prompt(30, seed) for seed in (80, 81, 82))


def serve(
    engines: EngineFactory, stage: str, policy: str, warm: list[list[int]], queue: list[list[int]]
) -> list[int]:
    """Indices of ``queue`` in the order in which they end, after ``warm`` prompts were answered before."""
    dialect = DIALECTS[stage]
    if policy not in dialect.policies:
        raise AssertionError(f"{stage} has no policy {policy}")
    engine: Engine = engines(stage, max_running_requests=1, **{dialect.policy_field: policy})
    for ids in warm:
        solo(engine, ids, greedy(1))
    rids = [engine.add(ids, greedy(3)) for ids in queue]
    answers = run(engine)
    return [rids.index(rid) for rid in answers if rid in rids]


def tail(seed: int) -> list[int]:
    return prompt(5, seed)


def test_fcfs_keeps_arrival_order(engines: EngineFactory, stage: str) -> None:
    queue = [B + tail(1), A + tail(2), C + tail(3), A + tail(4)]
    assert serve(engines, stage, "fcfs", [A], queue) == [0, 1, 2, 3]


@pytest.mark.needs("radix_cache")
def test_lpm_takes_the_longest_cached_prefix_first(engines: EngineFactory, stage: str) -> None:
    queue = [B + tail(1), A[:10] + tail(2), A + tail(3), A[:20] + tail(4)]
    assert serve(engines, stage, "lpm", [A], queue) == [2, 3, 1, 0]


@pytest.mark.needs("radix_cache")
def test_lpm_keeps_arrival_order_among_equals(engines: EngineFactory, stage: str) -> None:
    queue = [A + tail(1), B + tail(2), A + tail(3)]
    assert serve(engines, stage, "lpm", [A, B], queue) == [0, 1, 2]


@pytest.mark.needs("radix_cache")
def test_weight_follows_the_heavier_subtree(engines: EngineFactory, stage: str) -> None:
    if "weight" not in DIALECTS[stage].policies:
        policy = "dfs-weight"
    else:
        policy = "weight"
    queue = [B + tail(1), A + tail(2), A + tail(3), A + tail(4), C + tail(5), C + tail(6)]
    # One running at a time changes the weights as the queue drains: A 3, C 2, B 1; then A 2, C 2, B 1 …
    order = serve(engines, stage, policy, [A, B, C], queue)
    assert order[0] in (1, 2, 3), "A's subtree is the heaviest at first"
    assert order.index(0) > order.index(4), "B's is the lightest until C's has been served"


def test_random_serves_all_and_repeats(engines: EngineFactory, stage: str) -> None:
    queue = [tail(seed) for seed in range(8)]
    order = serve(engines, stage, "random", [], queue)
    assert sorted(order) == list(range(8))
    assert order != list(range(8)), "one in 40,320 orders is the arrival's; the seed is fixed"
