"""The normalised prompt logprob: right against transformers, the same warm and cold, from any position (B12)."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest

from strata.adapters import DIALECTS, Engine, ServerDriver

from .driving import Answer, collect, greedy, prompt, run
from .fixtures import EngineFactory, ServerFactory, model_folder
from .reference import reference
from .speaking import generate, is_error, probe, stream

pytestmark = [pytest.mark.slow, pytest.mark.needs("logprob.normalized_prompt")]

TOLERANCE = 1e-4


def expected(model: str, ids: list[int], start: int) -> float:
    """Mean log softmax of the tokens after position ``start``, by transformers."""
    if start == len(ids) - 1:
        return 0.0
    logprobs = reference(model_folder(model)).logits(ids).log_softmax(dim=-1)
    scores = [float(logprobs[position - 1, ids[position]]) for position in range(start + 1, len(ids))]
    return sum(scores) / len(scores)


def wish(stage: str, start: Any) -> dict[str, Any]:
    """Fields that ask for the score after position ``start``, in the stage's words."""
    wanted, start_len = DIALECTS[stage].prompt_logprob_fields
    return {wanted: True, start_len: start}


def score(engine: Engine, ids: list[int], wanted: dict[str, Any], max_new_tokens: int = 4) -> Answer:
    rid = engine.add(ids, greedy(max_new_tokens), fields=wanted)
    return run(engine)[rid]


def close(answer: Answer, model: str, ids: list[int], start: int) -> None:
    value = answer.meta["normalized_prompt_logprob"]
    assert value == pytest.approx(expected(model, ids, start), abs=TOLERANCE), (len(ids), start)


@pytest.mark.parametrize("model", ["llama", "llama-gqa3", "mistral"])
@pytest.mark.parametrize("length", [1, 2, 3, 50, 300])
def test_against_transformers_cold_and_warm(
    engines: EngineFactory, stage: str, model: str, length: int
) -> None:
    """From every kind of position; then the same with the prompt, and with an answer to it, in the cache."""
    engine, ids = engines(stage, model), prompt(length, seed=70)
    starts = sorted(
        {start for start in (0, 1, 5, length // 2, length - 2, length - 1) if 0 <= start < length}
    )
    for start in starts:
        engine.flush()
        engine.step()
        close(score(engine, ids, wish(stage, start)), model, ids, start)
        warm = score(engine, ids, wish(stage, start))
        close(warm, model, ids, start)
        # What has to be scored is computed again; all that comes before may be cached.
        assert warm.meta["cached_tokens"] == start
    longer = [*ids, *prompt(7, seed=71)]
    for start in (*starts, length + 3):
        close(score(engine, longer, wish(stage, start)), model, longer, start)


def test_in_batches(engines: EngineFactory, stage: str) -> None:
    """Those who ask and those who do not, cached and not, long and short, in one prefill."""
    engine = engines(stage)
    shared = prompt(40, seed=72)
    run(engine, {engine.add(shared, greedy(2)): Answer()})
    prompts = [shared[:cut] + prompt(tail, seed=73) for cut in (0, 20, 40) for tail in (1, 2, 9, 33)]
    wishes: dict[str, tuple[list[int], int]] = {}
    plain = []
    for number, ids in enumerate(prompts):
        for start in {0, len(ids) // 2, len(ids) - 1}:
            rid = engine.add(ids, greedy(3), fields=wish(stage, start), stream=number % 2 == 0)
            wishes[rid] = (ids, start)
        plain.append((engine.add(ids, greedy(3)), ids))
    answers = run(engine)
    for rid, (ids, start) in wishes.items():
        close(answers[rid], "llama", ids, start)
        assert len(answers[rid].ids) == 3
    for rid, ids in plain:
        assert "normalized_prompt_logprob" not in answers[rid].meta
        reference(model_folder("llama")).assert_greedy(ids, answers[rid].ids)


def test_more_rows_than_are_scored_at_once(
    engines: EngineFactory, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that begin and end inside of prompts."""
    engine = engines(stage)
    processor = importlib.import_module(f"{DIALECTS[stage].package}.layers.logits_processor")
    monkeypatch.setattr(processor, "LOGPROB_CHUNK_VALUES", 384 * 7)
    prompts = [prompt(length, seed=74) for length in (3, 20, 7, 8, 1, 30)]
    rids = [engine.add(ids, greedy(1), fields=wish(stage, len(ids) // 3)) for ids in prompts]
    answers = run(engine)
    for rid, ids in zip(rids, prompts, strict=True):
        close(answers[rid], "llama", ids, len(ids) // 3)


@pytest.mark.needs("retraction")
def test_retraction_keeps_it(engines: EngineFactory, stage: str) -> None:
    """A second prefill of a retracted request computes its output too, which is no part of its prompt."""
    engine, ids = engines(stage, max_total_tokens=300), prompt(20, seed=75)
    rids = [engine.add(ids, greedy(20), fields=wish(stage, 2)) for _ in range(3)]
    answers: dict[str, Answer] = {}
    for _ in range(6):
        collect(engine.step(), answers)
        engine.force("retract")
    run(engine, answers)
    for rid in rids:
        close(answers[rid], "llama", ids, 2)
        assert len(answers[rid].ids) == 20


def test_a_score_alone(engines: EngineFactory, stage: str) -> None:
    """``max_new_tokens`` 0: the mean and no token, as choosing between texts wants it."""
    engine, ids = engines(stage), prompt(30, seed=76)
    for start in (0, 28, 29):
        answer = score(engine, ids, wish(stage, start), max_new_tokens=0)
        close(answer, "llama", ids, start)
        assert answer.ids == [] and answer.finish == {"type": "length", "length": 0}
        assert answer.meta["completion_tokens"] == 0
    assert engine.state().free + engine.state().evictable == engine.state().size


@pytest.fixture
def server(servers: ServerFactory, stage: str) -> ServerDriver:
    return servers(stage)


@pytest.mark.slow
def test_over_http(server: ServerDriver, stage: str) -> None:
    """Alone, in lists with a start each, streamed; twice, so that the second time finds the cache."""
    wanted, start_len = DIALECTS[stage].prompt_logprob_fields
    prompts = [prompt(length, seed=77) for length in (2, 25, 90)]
    params = {"temperature": 0, "max_new_tokens": 3}
    with probe(server):
        for _ in range(2):
            starts = [0, 5, 88]
            body = {"input_ids": prompts, "sampling_params": params, wanted: True}
            answers = generate(server, **body, **{start_len: starts})
            for answer, ids, start in zip(answers, prompts, starts, strict=True):
                value = answer["meta_info"]["normalized_prompt_logprob"]
                assert value == pytest.approx(expected("llama", ids, start), abs=TOLERANCE)
        one = generate(server, **{**body, "input_ids": prompts[1], "sampling_params": {"max_new_tokens": 0}})
        assert one["text"] == "" and one["meta_info"]["completion_tokens"] == 0
        value = one["meta_info"]["normalized_prompt_logprob"]
        assert value == pytest.approx(expected("llama", prompts[1], 0), abs=TOLERANCE)
        for chunk in stream(server, "/generate", {**body, "input_ids": prompts[1]}):
            assert math.isclose(chunk["meta_info"]["normalized_prompt_logprob"], value, abs_tol=TOLERANCE)
        mixed = generate(server, **{**body, wanted: [True, False, True]})
        assert ["normalized_prompt_logprob" in one["meta_info"] for one in mixed] == [True, False, True]


@pytest.mark.parametrize("start", [-1, 3, 10**20, 1.5, "0", None, True, [0, 0]])
def test_a_start_outside_of_the_prompt_is_refused(server: ServerDriver, stage: str, start: Any) -> None:
    with probe(server):
        error = is_error(server.client.post("/generate", json={"input_ids": [5, 6, 7], **wish(stage, start)}))
        assert DIALECTS[stage].prompt_logprob_fields[1] in error["message"]
