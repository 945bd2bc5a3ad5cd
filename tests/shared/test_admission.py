"""How much admission expects of running requests: a ratio that adapts to what memory allows."""

from __future__ import annotations

import pytest

from .driving import greedy, prompt, run, solo
from .fixtures import EngineFactory

pytestmark = pytest.mark.needs("admission.new_token_ratio")

IDLE, DECAY, FLOOR = 0.7, 0.001, 0.2


def test_the_ratio_starts_at_its_idle_value_and_falls_with_every_step(
    engines: EngineFactory, stage: str
) -> None:
    engine = engines(stage)
    engine.step()  # an idle one
    assert engine.state().ratio == IDLE
    engine.add(prompt(5), greedy(12))
    engine.step()  # the prefill
    assert engine.state().ratio == IDLE
    for steps in range(1, 11):
        engine.step()
        assert engine.state().ratio == pytest.approx(IDLE - steps * DECAY)
    run(engine)
    engine.step()
    assert engine.state().ratio == IDLE


@pytest.mark.slow
@pytest.mark.parametrize(("conservativeness", "floor"), [(1.0, FLOOR), (2.5, 0.5), (100.0, 1.0)])
def test_it_never_falls_below_its_floor(
    engines: EngineFactory, stage: str, conservativeness: float, floor: float
) -> None:
    engine = engines(stage, schedule_conservativeness=conservativeness)
    solo(engine, prompt(4), greedy(600))
    engine.add(prompt(4, seed=1), greedy(700))
    lowest = 1.0
    for _ in range(690):
        engine.step()
        ratio = engine.state().ratio
        assert ratio is not None and ratio >= floor - 1e-9
        lowest = min(lowest, ratio)
    assert lowest == pytest.approx(max(floor, IDLE - 689 * DECAY))
    run(engine)


def test_a_retraction_sets_it_to_what_the_rest_have_shown(engines: EngineFactory, stage: str) -> None:
    """(output + 20 further tokens) of those that stay, over their limits."""
    engine = engines(stage)
    engine.step()
    engine.add(prompt(10, seed=1), greedy(400))
    for _ in range(30):
        engine.step()
    engine.add(prompt(10, seed=2), greedy(400))
    for _ in range(11):
        engine.step()
    done = 40  # tokens of the one that has done most, and so stays: one of its prefill, and one a decode step
    engine.force("retract")
    engine.step()
    state = engine.state()
    assert len(state.requests) == 1 and len(state.waiting) == 1
    assert state.ratio == pytest.approx((done + 20) / 400)
    run(engine)


def test_a_conservative_server_admits_fewer_at_once(engines: EngineFactory, stage: str) -> None:
    def most_running(conservativeness: float) -> int:
        engine = engines(stage, max_total_tokens=400, schedule_conservativeness=conservativeness)
        engine.step()
        for seed in range(8):
            engine.add(prompt(10, seed), greedy(100))
        most = 0
        while not most or engine.state().waiting or engine.state().requests:
            engine.step()
            most = max(most, len(engine.state().requests))
        return most

    assert most_running(5.0) < most_running(0.1)


def test_what_does_not_fit_is_not_overtaken(engines: EngineFactory, stage: str) -> None:
    """The first misfit ends the search: a long request is not starved by short ones behind it."""
    engine = engines(stage, max_total_tokens=300, schedule_heuristic="fcfs")
    engine.step()
    engine.add(prompt(20, seed=1), greedy(150))
    engine.step()
    long, short = engine.add(prompt(100, seed=2), greedy(120)), engine.add(prompt(3, seed=3), greedy(3))
    engine.step()
    assert engine.state().waiting == (long, short)
    run(engine)


@pytest.mark.needs("radix_cache.shared_while_running")
def test_a_prompt_is_shared_while_its_request_runs(engines: EngineFactory, stage: str) -> None:
    engine, ids = engines(stage), prompt(50, seed=4)
    first = engine.add(ids, greedy(30))
    engine.step()
    second = engine.add([*ids, 5, 6], greedy(5))
    answers = run(engine)
    assert answers[first].meta["cached_tokens"] == 0
    assert answers[second].meta["cached_tokens"] == 50


@pytest.mark.needs("allocation.padding_slot")
def test_no_request_gets_slot_zero(engines: EngineFactory, stage: str) -> None:
    """INV-PAD, also when the pool is full to the last slot."""
    engine = engines(stage, max_total_tokens=64)
    for seed in range(6):
        engine.add(prompt(9, seed), greedy(20))
    for _ in range(200):
        engine.step()
        state = engine.state()
        held = {slot for request in state.requests for slot in request.slots}
        held |= {slot for node in state.nodes for slot in node.slots}
        assert 0 not in held | state.free_slots
        if not state.requests and not state.waiting:
            return
    raise AssertionError("still busy")
