"""Out of memory while decoding, and limits that the pool sets (probes B20, B03; INV-FREE)."""

from __future__ import annotations

import pytest

from strata.adapters.invariants import check_all

from .driving import Answer, collect, greedy, prompt, run, solo
from .fixtures import EngineFactory, model_folder
from .reference import reference


@pytest.mark.needs("retraction")
@pytest.mark.parametrize("every", [1, 3, 7])
def test_forced_retraction_changes_no_text(engines: EngineFactory, stage: str, every: int) -> None:
    """Probe B20a: texts equal those of the unforced run; nothing is sent twice or lost."""
    engine = engines(stage, max_total_tokens=2000)
    prompts = [prompt(length, seed=30) for length in (3, 20, 50, 90)]
    expected = [solo(engine, ids, greedy(25)).ids for ids in prompts]
    generated = engine.counters["generated_tokens"]
    rids = [engine.add(ids, greedy(25), stream=i % 2 == 0) for i, ids in enumerate(prompts)]
    answers: dict[str, Answer] = {}
    for step in range(2000):
        if step % every == every - 1:
            engine.force("retract")
        collect(engine.step(), answers)
        state = engine.state()
        check_all(state)
        if every == 1 and step > 100:
            break  # retracting in every step leaves one request that advances; let the rest finish now
        if not state.running and not state.waiting:
            break
    run(engine, answers)
    assert [answers[rid].ids for rid in rids] == expected
    assert all(answers[rid].meta["completion_tokens"] == 25 for rid in rids)
    # History threw the output of a retracted request away (#440): here no token is generated twice.
    assert engine.counters["generated_tokens"] - generated == 25 * len(rids)


@pytest.mark.needs("retraction", "admission.new_token_ratio")
def test_the_debug_flag_retracts_by_itself(engines: EngineFactory, stage: str) -> None:
    """``--debug-retract-every N``: in every N-th decode step one request goes back to the queue."""
    engine, plain = engines(stage, debug_retract_every=4), engines(stage)
    prompts = [prompt(length, seed=36) for length in (4, 17, 33)]
    expected = [solo(plain, ids, greedy(20)).ids for ids in prompts]
    before = engine.counters["retractions"]
    rids = [engine.add(ids, greedy(20)) for ids in prompts]
    answers = run(engine)
    assert engine.counters["retractions"] - before >= 3
    assert [answers[rid].ids for rid in rids] == expected


@pytest.mark.needs("retraction")
def test_a_small_pool_retracts_by_itself(engines: EngineFactory, stage: str) -> None:
    """More output than admission expected: the ratio lets several in, and memory runs out."""
    engine, oracle = engines(stage, max_total_tokens=200), reference(model_folder("llama"))
    rids = {}
    for seed in range(6):
        ids = prompt(10, seed=31 + seed)
        rids[engine.add(ids, greedy(70))] = ids
    answers = run(engine)
    for rid, ids in rids.items():
        assert len(answers[rid].ids) == 70
        oracle.assert_greedy(ids, answers[rid].ids)


@pytest.mark.needs("retraction")
def test_the_last_request_ends_with_a_message(engines: EngineFactory, stage: str) -> None:
    """Probe B20c: nothing left to retract; a clean abort, and the engine serves on."""
    engine, ids = engines(stage, max_total_tokens=120), prompt(20, seed=32)
    expected = solo(engine, ids, greedy(30)).ids
    rid = engine.add(ids, greedy(30))
    answers = collect(engine.step())
    collect(engine.step(), answers)
    engine.force("oom")
    run(engine, answers)
    finish = answers[rid].finish
    assert finish is not None and finish["type"] == "abort" and "--max-total-tokens" in finish["message"]
    assert answers[rid].ids == expected[: len(answers[rid].ids)]
    assert solo(engine, ids, greedy(30)).ids == expected


def test_output_is_clamped_to_the_pool(engines: EngineFactory, stage: str) -> None:
    """No request can want more than the pool will ever hold: it would wait for ever."""
    engine, ids = engines(stage, max_total_tokens=120), prompt(100, seed=33)
    answer = solo(engine, ids, greedy(10_000_000))
    assert answer.finish is not None and answer.finish["type"] == "length"
    assert 1 <= len(answer.ids) <= 20
    reference(model_folder("llama")).assert_greedy(ids, answer.ids)


def test_the_largest_prompt_is_served(engines: EngineFactory, stage: str) -> None:
    engine = engines(stage, max_total_tokens=120)
    for length in (118, 117, 116):
        ids = prompt(length, seed=34)
        answer = solo(engine, ids, greedy(5))
        assert answer.finish is not None and answer.finish["type"] == "length"
        assert answer.ids
        reference(model_folder("llama")).assert_greedy(ids, answer.ids)


def test_a_prompt_beyond_the_pool_is_refused_at_once(engines: EngineFactory, stage: str) -> None:
    engine = engines(stage, max_total_tokens=120)
    rid = engine.add(prompt(119, seed=35), greedy(5))
    answers = collect(engine.step())
    finish = answers[rid].finish
    assert finish is not None and finish["type"] == "abort" and "119" in finish["message"]


def test_ids_out_of_the_vocabulary_end_their_request_alone(engines: EngineFactory, stage: str) -> None:
    """Probe B05, second line of defence: main refuses such ids, and the engine survives them all the same."""
    engine, good = engines(stage), prompt(12, seed=36)
    expected = solo(engine, good, greedy(6)).ids
    bad = [engine.add(ids, greedy(6)) for ids in ([999_999], [-1], [1, 2, 384], [-(2**62)])]
    rid = engine.add(good, greedy(6))
    answers = run(engine)
    for other in bad:
        finish = answers[other].finish
        assert finish is not None and finish["type"] == "abort" and "383" in finish["message"]
    assert answers[rid].ids == expected


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_few_tokens(engines: EngineFactory, stage: str, limit: int) -> None:
    """Probe B03: as many tokens as asked for, none included."""
    answer = solo(engines(stage), prompt(12, seed=37), greedy(limit))
    assert len(answer.ids) == limit
    assert answer.finish == {"type": "length", "length": limit}
    assert answer.meta["completion_tokens"] == limit


def test_the_context_ends_an_answer(engines: EngineFactory, stage: str) -> None:
    """The last position of the context is used, and no further one (history's row has a margin)."""
    engine = engines(stage, context_length=64)
    answer = solo(engine, prompt(60, seed=38), greedy(1000))
    assert answer.finish is not None and answer.finish["type"] == "length"
    assert 3 <= len(answer.ids) <= 4
    reference(model_folder("llama")).assert_greedy(prompt(60, seed=38), answer.ids)


def test_many_requests_at_once(engines: EngineFactory, stage: str) -> None:
    """More requests than rows or slots: all wait their turn, all are answered."""
    engine, oracle = engines(stage, max_total_tokens=300), reference(model_folder("llama"))
    rids = {engine.add(prompt(5 + n % 13, seed=n), greedy(4)): prompt(5 + n % 13, seed=n) for n in range(120)}
    answers = run(engine)
    for rid, ids in rids.items():
        assert len(answers[rid].ids) == 4
        oracle.assert_greedy(ids, answers[rid].ids)
