"""The OpenAI routes through the `openai` client (probe B08's list part, streams, chat, errors)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from strata.adapters import DIALECTS, ServerDriver

from .fixtures import ServerFactory
from .speaking import generate, openai_client, probe, stream

MODEL = "whatever"
CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hi, 中文 🤗."}]


@pytest.fixture
def server(servers: ServerFactory, stage: str) -> ServerDriver:
    return servers(stage)


@pytest.fixture
def client(server: ServerDriver) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


@pytest.mark.needs("openai.completions", "openai.usage")
def test_completion(client: openai.OpenAI, server: ServerDriver) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt="The quick brown fox",
        max_tokens=20,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    native = generate(
        server,
        text="The quick brown fox",
        sampling_params={"temperature": 0, "ignore_eos": True, "max_new_tokens": 20},
    )
    assert answer.object == "text_completion" and answer.model == MODEL
    [choice] = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, native["text"], "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == native["meta_info"]["prompt_tokens"]
    assert answer.usage.completion_tokens == 20
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 20


@pytest.mark.needs("openai.completions")
def test_defaults_of_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hi", logit_bias={"2": -100})
    assert answer.usage is not None and answer.usage.completion_tokens == 16


@pytest.mark.needs("openai.completions", "openai.stream")
def test_completion_stream(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": "There once was", "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**ask).choices[0]
    chunks = list(client.completions.create(**ask, stream=True))
    assert len(chunks) > 3 and len({chunk.id for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.text
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [whole.finish_reason]
    assert choices[-1].finish_reason == whole.finish_reason


@pytest.mark.needs("openai.completions", "openai.stream")
def test_list_of_prompts(client: openai.OpenAI, server: ServerDriver) -> None:
    """Probe B08: every prompt is answered under its own index, streamed or not; usage counts each once."""
    prompts = ["a", "b b", "The quick brown fox"]
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 15, "temperature": 0}
    alone = [client.completions.create(prompt=prompt, **ask) for prompt in prompts]
    together = client.completions.create(prompt=prompts, **ask)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [c.text for c in together.choices] == [a.choices[0].text for a in alone]
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone if a.usage)
    assert together.usage.completion_tokens == sum(a.usage.completion_tokens for a in alone if a.usage)

    texts, reasons = ["", "", ""], [None, None, None]
    for chunk in client.completions.create(prompt=prompts, stream=True, **ask):
        for choice in chunk.choices:
            assert reasons[choice.index] is None, "text after the end"
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [a.choices[0].text for a in alone]
    assert reasons == [a.choices[0].finish_reason for a in alone]

    for bad in (["a", ""], ["a", 3], [[1, 2], [999_999_999]], [[1, 2], []], []):
        with probe(server), pytest.raises(openai.BadRequestError):
            client.completions.create(prompt=bad, **ask)  # type: ignore[arg-type]


@pytest.mark.needs("openai.completions")
def test_token_ids_as_prompt(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 10, "temperature": 0}
    single = client.completions.create(prompt=[10, 20, 30], **ask)
    double = client.completions.create(prompt=[[10, 20, 30], [40, 50]], **ask)
    assert single.usage is not None and single.usage.prompt_tokens == 3
    assert double.choices[0].text == single.choices[0].text and len(double.choices) == 2


@pytest.mark.needs("openai.chat", "openai.stream", "openai.usage")
def test_chat(client: openai.OpenAI, server: ServerDriver) -> None:
    """The model's own template renders the prompt; streamed and whole answers are one."""
    ask: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 30, "temperature": 0}
    answer = client.chat.completions.create(**ask)
    rendered = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay hi, 中文 🤗.<|im_end|>\n"
    rendered += "<|im_start|>assistant\n"
    native = generate(server, text=rendered, sampling_params={"temperature": 0, "max_new_tokens": 30})
    [choice] = answer.choices
    assert answer.object == "chat.completion"
    assert (choice.index, choice.message.role) == (0, "assistant")
    assert choice.message.content == native["text"]
    assert choice.finish_reason == native["meta_info"]["finish_reason"]["type"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == native["meta_info"]["prompt_tokens"]

    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == native["text"]
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
        choice.finish_reason
    ]


@pytest.mark.needs("openai.chat")
def test_chat_takes_content_parts_and_the_newer_limit(client: openai.OpenAI) -> None:
    plain: Any = [{"role": "user", "content": "one two"}]
    parts: Any = [
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}
    ]
    ask: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_completion_tokens": 9}
    first = client.chat.completions.create(messages=plain, **ask)
    assert first.choices[0] == client.chat.completions.create(messages=parts, **ask).choices[0]
    assert first.usage is not None and first.usage.completion_tokens <= 9


@pytest.mark.needs("openai.chat")
def test_chat_refuses_broken_conversations(client: openai.OpenAI, server: ServerDriver) -> None:
    for messages in (
        [],
        [{"role": "user"}, 3],
        [{"content": "no role"}],
        "hi",
        [{"role": 1, "content": "x"}],
    ):
        with probe(server), pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert len(models) == 1 and models[0].id


@pytest.mark.needs("openai.completions", "sampling.stop_strings")
def test_stop(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": "Counting:", "max_tokens": 60, "temperature": 0}
    text = client.completions.create(**ask).choices[0].text
    stop = next(text[i : i + 2] for i in range(10, len(text)) if "\ufffd" not in text[i : i + 2])
    choice = client.completions.create(**ask, stop=[stop]).choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")


@pytest.mark.needs("openai.completions", "sampling.seed")
def test_seed(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 30, "temperature": 1}
    texts = [client.completions.create(**ask, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    unseeded = {client.completions.create(**ask).choices[0].text for _ in range(3)}
    assert len(unseeded) == 3


@pytest.mark.needs("openai.completions")
def test_neutral_values_pass(client: openai.OpenAI) -> None:
    neutral: dict[str, Any] = {
        "n": 1,
        "best_of": 1,
        "echo": False,
        "logprobs": None,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "user": "me",
        "suffix": None,
        "stop": None,
    }
    assert client.completions.create(model=MODEL, prompt="hi", max_tokens=3, **neutral).choices[0].text
    chat: dict[str, Any] = {
        "n": 1,
        "logprobs": False,
        "tools": [],
        "tool_choice": "none",
        "metadata": {"a": "b"},
        "response_format": {"type": "text"},
        "presence_penalty": 0,
        "top_logprobs": None,
        "user": "me",
    }
    answer = client.post(
        "/chat/completions", body={"model": MODEL, "messages": CHAT, "max_tokens": 3, **chat}, cast_to=object
    )
    assert answer


@pytest.mark.needs("openai.stream")
def test_stream_frames(server: ServerDriver, stage: str) -> None:
    """Server-sent events byte by byte: the helper checks framing and [DONE]; usage by the stage's habit."""
    chunks = stream(server, "/v1/completions", {"prompt": "hi", "max_tokens": 8, "temperature": 0})
    assert {bool(chunk.get("usage")) for chunk in chunks} == {DIALECTS[stage].usage_in_every_chunk}
    chunks = stream(server, "/v1/completions", {"prompt": "hi", "max_tokens": 0})
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == ""
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
