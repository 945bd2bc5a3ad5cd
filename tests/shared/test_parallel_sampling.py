"""Several answers to one prompt (probe B08): in order, each with draws of its own, after one prefill for all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from strata.adapters import DIALECTS, ServerDriver

from .driving import prompt
from .fixtures import ServerFactory
from .speaking import generate, internal_state, is_error, openai_client, probe, stream, wait_idle

pytestmark = pytest.mark.needs("sampling.n")

DRAWN = {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture
def server(servers: ServerFactory, stage: str) -> ServerDriver:
    return servers(stage)


@pytest.fixture
def client(server: ServerDriver) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


def flush(server: ServerDriver) -> dict[str, Any]:
    wait_idle(server)
    server.client.post("/flush_cache").raise_for_status()
    return internal_state(server)


def test_samples_are_those_of_successive_seeds(server: ServerDriver) -> None:
    """Sample i of seed s is what seed s + i draws alone; the largest seed has successors too."""
    for seed in (7, 2**63 - 2):
        answers = generate(server, text="Once upon", sampling_params={**DRAWN, "n": 4, "seed": seed})
        assert len({answer["text"] for answer in answers}) == 4
        for i, answer in enumerate(answers):
            own = seed + i if seed + i < 2**63 else seed + i - 2**64
            alone = generate(server, text="Once upon", sampling_params={**DRAWN, "seed": own})
            assert alone["text"] == answer["text"]
            assert answer["meta_info"]["completion_tokens"] == 12
    unseeded = generate(server, text="Once upon", sampling_params={**DRAWN, "n": 3})
    assert len({answer["text"] for answer in unseeded}) == 3


def test_the_prompt_is_computed_once(server: ServerDriver) -> None:
    """One prefill of it, then one token more for each sample, which must have logits to draw from (INV-ONE)."""
    with probe(server):
        before = flush(server)
        ids = prompt(100, seed=190)
        answers = generate(server, input_ids=ids, sampling_params={**DRAWN, "n": 5})
        after = wait_idle(server)
        assert after["prefill_tokens"] - before["prefill_tokens"] == 100 + 5
        assert after["cached_tokens"] - before["cached_tokens"] == 5 * 99
        # What a client hears is what its call found, not what its own first prefill left.
        assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [0] * 5
        again = generate(server, input_ids=ids, sampling_params={**DRAWN, "n": 2})
        assert [answer["meta_info"]["cached_tokens"] for answer in again] == [99, 99]


def test_lists_are_answered_prompt_by_prompt(server: ServerDriver) -> None:
    prompts = [prompt(length, seed=191) for length in (3, 40, 1)]
    params = [{**DRAWN, "n": 2, "seed": seed, "max_new_tokens": 5 + seed} for seed in range(3)]
    answers = generate(server, input_ids=prompts, sampling_params=params)
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [3, 3, 40, 40, 1, 1]
    for number, ids in enumerate(prompts):
        for i in range(2):
            one = {**DRAWN, "seed": number + i, "max_new_tokens": 5 + number}
            alone = generate(server, input_ids=ids, sampling_params=one)
            assert alone["text"] == answers[2 * number + i]["text"]
    [one] = generate(server, input_ids=[prompts[0]], sampling_params={**DRAWN, "n": 1})
    assert one["text"]


def test_names_of_samples(server: ServerDriver) -> None:
    answers = generate(server, text="hi", rid="mine", sampling_params={**DRAWN, "n": 2})
    assert [answer["meta_info"]["id"] for answer in answers] == ["mine-0", "mine-1"]


def test_a_stream_tells_them_apart(server: ServerDriver) -> None:
    body: dict[str, Any] = {"text": "Once upon", "sampling_params": {**DRAWN, "n": 3, "seed": 2}}
    whole = generate(server, **body)
    texts: dict[int, str] = {}
    for chunk in stream(server, "/generate", body):
        assert chunk["text"].startswith(texts.get(chunk["index"], ""))
        texts[chunk["index"]] = chunk["text"]
    assert [texts[i] for i in range(3)] == [answer["text"] for answer in whole]


@pytest.mark.needs("logprob.tokens")
def test_log_probabilities_of_the_prompt_are_shared(server: ServerDriver, stage: str) -> None:
    """The prompt is scored once for all, and each sample tells all of it; the numbers are those of one request."""
    prefill, decode = DIALECTS[stage].logprob_prefixes
    for length in (1, 30):
        ids = prompt(length, seed=192)
        body = {"input_ids": ids, "return_logprob": True, "top_logprobs_num": 2}
        before = flush(server)
        answers = generate(server, **body, sampling_params={**DRAWN, "n": 3, "seed": 4})
        after = wait_idle(server)
        assert after["prefill_tokens"] - before["prefill_tokens"] == length + 3
        for i, answer in enumerate(answers):
            alone = generate(server, **body, sampling_params={**DRAWN, "seed": 4 + i})
            for kind in ("token", "top"):
                for prefix in (prefill, decode):
                    name = f"{prefix}_{kind}_logprobs"
                    assert len(answer["meta_info"][name]) == len(alone["meta_info"][name])
            name = f"{prefill}_token_logprobs"
            ours, theirs = answer["meta_info"][name], alone["meta_info"][name]
            assert [token[1] for token in ours] == [token[1] for token in theirs] == ids
            assert answer["meta_info"]["normalized_prompt_logprob"] == pytest.approx(
                alone["meta_info"]["normalized_prompt_logprob"], abs=1e-4
            )


def test_no_tokens_at_all(server: ServerDriver) -> None:
    answers = generate(server, text="hi there", sampling_params={"max_new_tokens": 0, "n": 2})
    assert [(a["text"], a["meta_info"]["completion_tokens"]) for a in answers] == [("", 0)] * 2
    assert generate(server, text="hi there", sampling_params={"max_new_tokens": 0})["text"] == ""


@pytest.mark.needs("regex")
def test_each_sample_obeys_a_regex(server: ServerDriver) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 30, "regex": "[ab]{5}", "n": 4, "seed": 1}
    texts = [answer["text"] for answer in generate(server, text="x", sampling_params=params)]
    assert all(len(text) == 5 and set(text) <= {"a", "b"} for text in texts)


def test_what_cannot_be_had_is_refused(server: ServerDriver) -> None:
    with probe(server):
        for n in (0, -1, 129, 1.5, "2", None, True, 10**30):
            error = is_error(server.client.post("/generate", json={"text": "a", "sampling_params": {"n": n}}))
            assert "n" in error["message"].split() or "sampling_params.n" in error["message"], error
        for n in (0, 129, 1.5, "2", True):
            error = is_error(server.client.post("/v1/completions", json={"prompt": "a", "n": n}))
            assert error["param"] == "n", error
        mixed = {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}
        assert "same for all" in is_error(server.client.post("/generate", json=mixed))["message"]
        many = {"text": ["a"] * 100, "sampling_params": {"n": 100}}
        assert "1024" in is_error(server.client.post("/generate", json=many))["message"]


def test_a_client_that_goes_leaves_nothing(server: ServerDriver) -> None:
    """INV-FREE for every sample, streamed or not."""
    long = {"temperature": 1.0, "max_new_tokens": 1500, "ignore_eos": True, "n": 6}
    with probe(server):
        before = internal_state(server)["generated_tokens"]
        body = {"text": "count", "sampling_params": long, "stream": True}
        with server.client.stream("POST", "/generate", json=body) as response:
            next(response.iter_raw())
        wait_idle(server)
        assert internal_state(server)["generated_tokens"] - before < 6 * 1500


@pytest.mark.needs("openai.n", "openai.completions", "openai.usage")
def test_completions(client: openai.OpenAI, server: ServerDriver) -> None:
    """Two prompts with two answers each: indices 0 to 3, prompt by prompt; usage counts each prompt once."""
    ask: dict[str, Any] = {"model": "m", "max_tokens": 9, "temperature": 1, "seed": 3, "n": 2}
    answer = client.completions.create(prompt=["a", "b b"], extra_body={"ignore_eos": True}, **ask)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = [generate(server, text=text, sampling_params={"max_new_tokens": 1}) for text in ("a", "b b")]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(one["meta_info"]["prompt_tokens"] for one in alone)
    assert answer.usage.completion_tokens == 4 * 9
    texts, usage = ["", "", "", ""], None
    for chunk in client.completions.create(
        prompt=["a", "b b"], stream=True, extra_body={"ignore_eos": True}, **ask
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        usage = chunk.usage or usage
    assert texts == [choice.text for choice in answer.choices]
    if usage is not None:
        assert usage.total_tokens == answer.usage.total_tokens
    with probe(server), pytest.raises(openai.BadRequestError):
        client.completions.create(prompt=["a", ""], **ask)


@pytest.mark.needs("openai.n", "openai.chat")
def test_chats(client: openai.OpenAI) -> None:
    """Each answer begins with the role and ends with a reason of its own, under its index."""
    ask: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 3, "seed": 8}
    ask |= {"temperature": 1, "max_tokens": 9}
    whole = client.chat.completions.create(**ask)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) == 3
    texts, roles, reasons = ["", "", ""], [[], [], []], [[], [], []]  # type: ignore[var-annotated]
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            if choice.delta.role:
                assert not texts[choice.index]
                roles[choice.index].append(choice.delta.role)
            texts[choice.index] += choice.delta.content or ""
            assert not reasons[choice.index], "a piece after the end"
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == [["assistant"]] * 3
    assert reasons == [[choice.finish_reason] for choice in whole.choices]
