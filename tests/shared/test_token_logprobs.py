"""Log probabilities of tokens: the model's own, against transformers, teacher-forced over prompt and output.

In mixed batches, with cached prefixes, through retraction, in streams, and over HTTP (probe B12).
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.adapters import DIALECTS, Engine, ServerDriver

from .driving import Answer, collect, greedy, prompt, run
from .fixtures import EngineFactory, ServerFactory, model_folder
from .reference import reference
from .speaking import generate, is_error, probe, stream

pytestmark = pytest.mark.needs("logprob.tokens")

TOLERANCE = 2e-3 if torch.cuda.is_available() else 1e-3
"""On a GPU a logit may be off by 1e-3, and the sum over all of them too."""


def wish(start: int = 0, top: int = 0) -> dict[str, Any]:
    return {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": top}


def lists(stage: str, meta: dict[str, Any]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """The prompt's and the output's tokens, the prompt's and the output's top tokens."""
    prefill, decode = DIALECTS[stage].logprob_prefixes
    names = [f"{prefix}_{kind}_logprobs" for kind in ("token", "top") for prefix in (prefill, decode)]
    return tuple(meta[name] for name in names)


def check(stage: str, model: str, ids: list[int], answer: Answer, start: int = 0, top: int = 0) -> None:
    """Every list is whole, and every number is the reference's."""
    prompt_tokens, output_tokens, prompt_tops, output_tops = lists(stage, answer.meta)
    output = answer.all_ids
    table = reference(model_folder(model)).logits([*ids, *output]).log_softmax(dim=-1)
    if start == 0:
        assert tuple(prompt_tokens[0][:2]) == (None, ids[0])
        prompt_tokens = prompt_tokens[1:]
    assert [token[1] for token in prompt_tokens] == ids[start + 1 :]
    assert [token[1] for token in output_tokens] == output
    close(prompt_tokens, table[start : len(ids) - 1])
    close(output_tokens, table[len(ids) - 1 : -1])
    scores = [token[0] for token in prompt_tokens]
    mean = math.fsum(scores) / max(len(scores), 1)
    assert answer.meta["normalized_prompt_logprob"] == pytest.approx(mean, abs=1e-6)
    if top == 0:
        assert prompt_tops == output_tops == []
        return
    if start == 0:
        assert prompt_tops[0] is None
        prompt_tops = prompt_tops[1:]
    close_tops(prompt_tops, table[start : len(ids) - 1], top)
    close_tops(output_tops, table[len(ids) - 1 : -1], top)


def close(tokens: list[Any], table: Tensor) -> None:
    assert len(tokens) == len(table)
    for (score, token_id, *_), row in zip(tokens, table, strict=True):
        assert score == pytest.approx(float(row[token_id]), abs=TOLERANCE)


def close_tops(tops: list[Any], table: Tensor, num: int) -> None:
    """So many a place, each with its own number, best first, and none left out that is clearly better."""
    assert len(tops) == len(table)
    for entries, row in zip(tops, table, strict=True):
        assert len({entry[1] for entry in entries}) == len(entries) == num
        close(entries, row.expand(num, -1))
        scores = [entry[0] for entry in entries]
        assert scores == sorted(scores, reverse=True)
        assert scores[-1] == pytest.approx(float(row.topk(num).values[-1]), abs=TOLERANCE)


def ask(engine: Engine, ids: list[int], params: dict[str, Any], start: int = 0, top: int = 0) -> Answer:
    rid = engine.add(ids, params, fields=wish(start, top))
    return run(engine)[rid]


@pytest.mark.parametrize("model", ["llama", "llama-gqa3", "mistral"])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_against_transformers(engines: EngineFactory, stage: str, model: str, length: int) -> None:
    """From every kind of position, cold, and warm with the prompt and an answer to it in the cache."""
    engine, ids = engines(stage, model), prompt(length, seed=170)
    for start in sorted({0, length // 2, length - 1}):
        for top in (0, 4):
            engine.flush()
            engine.step()
            cold = ask(engine, ids, greedy(5), start, top)
            check(stage, model, ids, cold, start, top)
            warm = ask(engine, ids, greedy(5), start, top)
            check(stage, model, ids, warm, start, top)
            assert warm.meta["cached_tokens"] == start


@pytest.mark.slow
def test_the_embedded_model(engines: EngineFactory, stage: str) -> None:
    """A trained model with a vocabulary of 49,152: its logits are large, its best tokens close."""
    engine = engines(stage, "smollm2")
    for length, top in ((1, 2), (60, 5)):
        ids = prompt(length, seed=171, vocab=40_000)
        check(stage, "smollm2", ids, ask(engine, ids, greedy(6), 0, top), 0, top)


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.needs("cuda_graph"))])
def test_in_batches(engines: EngineFactory, stage: str, graphs: bool) -> None:
    """Those who ask, for as many top tokens as each likes, among those who do not; and in both kinds of forward.

    A replay overwrites the logits of the one before: what was read of them must have been (#775).
    """
    engine = engines(stage, **(dict(DIALECTS[stage].graph_args) if graphs else {}))
    shared, replays = prompt(30, seed=172), engine.counters["graph_replays"]
    run(engine, {engine.add(shared, greedy(2)): Answer()})
    asked: dict[str, tuple[list[int], int, int]] = {}
    plain: dict[str, list[int]] = {}
    answers: dict[str, Answer] = {}
    for number, cut in enumerate((0, 10, 20, 30)):
        for tail in (1, 4, 17):
            ids = shared[:cut] + prompt(tail, seed=173)
            start, top = (number * 7) % len(ids), (0, 1, 5, 64)[(number + tail) % 4]
            asked[engine.add(ids, greedy(3 + tail), fields=wish(start, top))] = (ids, start, top)
            plain[engine.add(ids, greedy(3 + tail))] = ids
        collect(engine.step(), answers)  # the next ones come while these decode
    run(engine, answers)
    for rid, (ids, start, top) in asked.items():
        check(stage, "llama", ids, answers[rid], start, top)
    assert (engine.counters["graph_replays"] > replays) is graphs
    for rid, ids in plain.items():
        assert not [key for key in answers[rid].meta if "logprob" in key]
        reference(model_folder("llama")).assert_greedy(ids, answers[rid].ids)


def test_numbers_are_the_models_own(engines: EngineFactory, stage: str) -> None:
    """Temperature, bias and masks choose the token, and change nothing about what the model thinks of it."""
    engine, ids = engines(stage), prompt(12, seed=174)
    for params in (
        {"temperature": 2.5, "seed": 5},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 9, "seed": 6},
        {"temperature": 0.0, "logit_bias": {77: 100.0}},
        {"temperature": 0.0, "regex": "[a-c]{6}"},
        {"temperature": 1.0, "dtype": "int", "seed": 7},
    ):
        answer = ask(engine, ids, {"max_new_tokens": 6, **params}, 3, 3)
        check(stage, "llama", ids, answer, 3, 3)
    assert answer.ids


@pytest.mark.needs("regex")
def test_what_a_regex_forces_is_scored_too(engines: EngineFactory, stage: str) -> None:
    """No token comes without its number, whether or not the stage could have jumped over it."""
    engine, ids = engines(stage), prompt(12, seed=182)
    answer = ask(
        engine, ids, {"max_new_tokens": 60, "temperature": 0, "regex": "(the|one) and then again"}, 0, 2
    )
    check(stage, "llama", ids, answer, 0, 2)
    assert len(answer.ids) > 5


def test_the_token_that_ends_an_answer_is_scored(engines: EngineFactory, stage: str) -> None:
    """End of sequence is no text, but a completion token, with a number of its own."""
    engine, ids = engines(stage), prompt(12, seed=175)
    answer = ask(engine, ids, {"max_new_tokens": 9, "temperature": 0, "logit_bias": {2: 100.0}}, 11, 2)
    assert answer.ids == [] and answer.finish == {"type": "stop", "matched": 2}
    check(stage, "llama", ids, answer, 11, 2)


def test_no_tokens(engines: EngineFactory, stage: str) -> None:
    engine, ids = engines(stage), prompt(9, seed=176)
    answer = ask(engine, ids, greedy(0), 0, 3)
    assert answer.ids == [] and lists(stage, answer.meta)[1] == lists(stage, answer.meta)[3] == []
    check(stage, "llama", ids, answer, 0, 3)


def test_streams_add_up(engines: EngineFactory, stage: str) -> None:
    """Each event has all that is known so far: the prompt at once, then one token more each time."""
    engine, ids = engines(stage), prompt(20, seed=177)
    rid = engine.add(ids, greedy(8), stream=True, fields=wish(4, 2))
    answers: dict[str, Answer] = {}
    for count in range(1, 9):
        collect(engine.step(), answers)
        tokens = lists(stage, answers[rid].meta)
        assert [len(each) for each in tokens] == [15, count, 15, count]
    check(stage, "llama", ids, answers[rid], 4, 2)


@pytest.mark.needs("retraction")
def test_retraction_keeps_what_is_known(engines: EngineFactory, stage: str) -> None:
    """A second prefill computes prompt and output again; neither is scored, or listed, twice."""
    engine, ids = engines(stage, debug_retract_every=3), prompt(20, seed=178)
    before = engine.counters["retractions"]
    starts = {
        engine.add(ids, greedy(14), stream=stream, fields=wish(2, 2)): stream for stream in (True, False)
    }
    starts |= {engine.add(prompt(33, seed=178), greedy(20)): False}
    answers = run(engine)
    assert engine.counters["retractions"] > before + 2
    for rid in list(starts)[:2]:
        check(stage, "llama", ids, answers[rid], 2, 2)


def test_chunks_that_end_inside_of_prompts(
    engines: EngineFactory, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt's logits never exist at once, whoever wants top tokens."""
    engine = engines(stage)
    processor = importlib.import_module(f"{DIALECTS[stage].package}.layers.logits_processor")
    monkeypatch.setattr(processor, "LOGPROB_CHUNK_VALUES", 384 * 7)
    rows: list[int] = []
    select = processor.selected_logprobs

    def counting(logits: Tensor, next_ids: Tensor) -> Tensor:
        rows.append(len(logits))
        return select(logits, next_ids)

    monkeypatch.setattr(processor, "selected_logprobs", counting)
    wishes = {}
    for length, top in ((3, 0), (20, 2), (7, 0), (8, 5), (1, 1), (30, 0)):
        ids = prompt(length, seed=179)
        wishes[engine.add(ids, greedy(1), fields=wish(length // 3, top))] = (ids, length // 3, top)
    answers = run(engine)
    assert max(rows) == 7 and len(rows) > 5
    for rid, (ids, start, top) in wishes.items():
        check(stage, "llama", ids, answers[rid], start, top)


def test_asking_does_not_change_the_answer(engines: EngineFactory, stage: str) -> None:
    engine, ids = engines(stage), prompt(15, seed=180)
    for params in (greedy(12), {"max_new_tokens": 12, "temperature": 1.2, "seed": 3}):
        rid = engine.add(ids, params)
        plain = run(engine)[rid]
        assert ask(engine, ids, params, 0, 5).ids == plain.ids


@pytest.fixture
def server(servers: ServerFactory, stage: str) -> ServerDriver:
    return servers(stage)


def answer_of(output: dict[str, Any], ids: list[int]) -> Answer:
    return Answer(ids=ids, finish=None, meta=output["meta_info"])


@pytest.mark.slow
def test_over_http(server: ServerDriver, stage: str) -> None:
    """Cold and warm, in lists with wishes of their own, streamed; the text of tokens where it is asked for."""
    prompts = [prompt(length, seed=181) for length in (1, 25, 90)]
    params = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
    starts, tops = [0, 5, 89], [3, 0, 1]
    body = {"input_ids": prompts, "sampling_params": params, "return_logprob": True}
    with probe(server):
        for _ in range(2):
            outputs = generate(server, **body, logprob_start_len=starts, top_logprobs_num=tops)
            for output, ids, start, top in zip(outputs, prompts, starts, tops, strict=True):
                tokens = [token[1] for token in lists(stage, output["meta_info"])[1]]
                assert len(tokens) == output["meta_info"]["completion_tokens"] == 5
                check(stage, "llama", ids, answer_of(output, tokens), start, top)
                assert {token[2] for token in lists(stage, output["meta_info"])[1]} == {None}
        mixed = generate(server, **{**body, "return_logprob": [True, False, True]})
        assert ["normalized_prompt_logprob" in one["meta_info"] for one in mixed] == [True, False, True]

        one = {**body, "input_ids": prompts[1], "top_logprobs_num": 2, "return_text_in_logprobs": True}
        whole = generate(server, **one)
        assert "".join(token[2] for token in lists(stage, whole["meta_info"])[1]).startswith(
            whole["text"].rstrip("\ufffd")[:3]
        )
        chunks = stream(server, "/generate", one)
        counts = [len(lists(stage, chunk["meta_info"])[1]) for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 5
        assert {len(lists(stage, chunk["meta_info"])[0]) for chunk in chunks} == {25}
        last = lists(stage, chunks[-1]["meta_info"])
        for streamed, plain in zip(last, lists(stage, whole["meta_info"]), strict=True):
            assert len(streamed) == len(plain)
        assert [token[1:] for token in last[1]] == [
            token[1:] for token in lists(stage, whole["meta_info"])[1]
        ]


@pytest.mark.slow
def test_a_prompt_alone_and_its_text(server: ServerDriver, stage: str) -> None:
    text = "naïve café, 中文 🤗"
    params = {"max_new_tokens": 0}
    output = generate(
        server, text=text, sampling_params=params, return_logprob=True, return_text_in_logprobs=True
    )
    tokens = lists(stage, output["meta_info"])[0]
    assert tokens[0][0] is None and all(token[0] < 0 for token in tokens[1:])
    shown = "".join(token[2] for token in tokens)
    assert shown.startswith("na") and len(tokens) == output["meta_info"]["prompt_tokens"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"return_logprob": "yes"}, "return_logprob"),
    ({"return_logprob": [True, True]}, "return_logprob"),
    ({"return_logprob": True, "logprob_start_len": 3}, "logprob_start_len"),
    ({"return_logprob": True, "logprob_start_len": -1}, "logprob_start_len"),
    ({"return_logprob": True, "logprob_start_len": None}, "logprob_start_len"),
    ({"return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
    ({"return_logprob": True, "top_logprobs_num": 65}, "64"),
    ({"return_logprob": True, "top_logprobs_num": 1.5}, "top_logprobs_num"),
    ({"return_logprob": True, "top_logprobs_num": [1, 2]}, "top_logprobs_num"),
    ({"return_logprob": True, "top_logprobs_num": 10**30}, "top_logprobs_num"),
    ({"return_text_in_logprobs": [True]}, "return_text_in_logprobs"),
]


def test_bad_wishes_are_refused(server: ServerDriver) -> None:
    with probe(server):
        for fields, named in BAD:
            error = is_error(server.client.post("/generate", json={"input_ids": [5, 6, 7], **fields}))
            assert named in error["message"], (fields, error)


def test_more_numbers_than_an_answer_can_carry(server: ServerDriver) -> None:
    """The limit is named, and how to stay below it."""
    with probe(server):
        body = {"input_ids": [[5] * 1000] * 40, "return_logprob": True, "top_logprobs_num": 64}
        error = is_error(server.client.post("/generate", json=body))
        assert "1048576" in error["message"] and "top_logprobs_num" in error["message"]


def test_the_reference_reads_what_it_should() -> None:
    """Guards this file's own oracle: a shifted table must fail."""
    table = torch.eye(4).log_softmax(dim=-1)
    close([(float(table[0, 0]), 0)], table[:1])
    with pytest.raises(AssertionError):
        close([(float(table[0, 0]), 1)], table[:1])
