"""Echo and log probabilities of completions through the `openai` client (probe B12 over OpenAI's route)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.completion_choice import Logprobs
from tokenizers import Tokenizer

from strata.adapters import DIALECTS, ServerDriver

from .fixtures import ServerFactory, model_folder
from .reference import reference
from .speaking import generate, is_error, openai_client, probe

pytestmark = [pytest.mark.slow, pytest.mark.needs("openai.completions", "openai.echo", "openai.logprobs")]

PROMPTS = ["The quick brown fox", "naïve café, 中文 🤗", "a"]
TOLERANCE = 1e-3


@pytest.fixture
def server(servers: ServerFactory, stage: str) -> ServerDriver:
    return servers(stage)


@pytest.fixture
def client(server: ServerDriver) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(model_folder("llama") / "tokenizer.json"))


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    defaults: dict[str, Any] = {"model": "m", "max_tokens": 12, "temperature": 0}
    extra = {"ignore_eos": True, "skip_special_tokens": False}
    return client.completions.create(**{**defaults, **fields}, extra_body=extra)


def test_echo(client: openai.OpenAI, server: ServerDriver) -> None:
    """The prompt, then the answer, for strings and token ids, in lists; with no answer the prompt alone."""
    plain = ask(client, prompt=PROMPTS)
    echoed = ask(client, prompt=PROMPTS, echo=True)
    for prompt, short, long in zip(PROMPTS, plain.choices, echoed.choices, strict=True):
        assert long.text == prompt + short.text and long.logprobs is None
    assert echoed.usage.prompt_tokens == plain.usage.prompt_tokens
    assert echoed.usage.completion_tokens == plain.usage.completion_tokens == len(PROMPTS) * 12
    only = ask(client, prompt="just this", echo=True, max_tokens=0)
    assert only.choices[0].text == "just this" and only.usage.completion_tokens == 0


def test_echo_of_token_ids(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """Special tokens are shown: whoever sends ids may have put them there."""
    ids = [1, *tokenizer.encode("user hi").ids, 2]
    for prompt in (ids, [ids, ids]):
        for choice in ask(client, prompt=prompt, echo=True, max_tokens=3).choices:
            assert choice.text.startswith("<|im_start|>user hi<|im_end|>")


@pytest.mark.needs("openai.n")
def test_echo_with_n(client: openai.OpenAI) -> None:
    """Probe B08's last part: each of the four answers begins with its own prompt."""
    answer = ask(client, prompt=["a", "b"], n=2, echo=True, temperature=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[0] for choice in answer.choices] == ["a", "a", "b", "b"]
    texts = ["", "", "", ""]
    for chunk in ask(client, prompt=["a", "b"], n=2, echo=True, temperature=1, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [text[0] for text in texts] == ["a", "a", "b", "b"]
    assert all(len(text) > 1 for text in texts)


def check(logprobs: Logprobs, text: str, begin: int, tokenizer: Tokenizer, prompt: str, top: int) -> None:
    """Lists in parallel, numbers of the reference, offsets at which the tokens really lie in ``text``."""
    tokens, scores, offsets = logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset
    assert tokens is not None and scores is not None and offsets is not None
    assert len(tokens) == len(scores) == len(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        if "\ufffd" not in token:
            assert text[offset : offset + len(token)] == token
    assert offsets == sorted(offsets) and offsets[0] == begin
    if top == 0:
        assert logprobs.top_logprobs is None
        return
    tops = logprobs.top_logprobs
    assert tops is not None and len(tops) == len(tokens)
    for token, score, entries in zip(tokens, scores, tops, strict=True):
        if score is None:
            assert entries is None
            continue
        # As OpenAI: the token itself is always there, so that there may be one more than was asked for.
        assert token in entries and len(entries) <= top + 1
        if "\ufffd" not in token:
            assert entries[token] == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("top", [0, 1, 5])
@pytest.mark.parametrize("text", PROMPTS)
def test_logprobs(
    client: openai.OpenAI, server: ServerDriver, tokenizer: Tokenizer, text: str, top: int
) -> None:
    """Of the answer alone, and with the prompt; cold and warm are equal (B12)."""
    ids = tokenizer.encode(text).ids
    server.client.post("/flush_cache")
    plain = ask(client, prompt=text, logprobs=top).choices[0]
    assert len(plain.logprobs.tokens) == 12
    check(plain.logprobs, plain.text, 0, tokenizer, text, top)
    cold, warm = (ask(client, prompt=text, logprobs=top, echo=True).choices[0] for _ in range(2))
    assert len(cold.logprobs.tokens) == len(ids) + 12
    assert cold.logprobs.token_logprobs[0] is None
    check(cold.logprobs, cold.text, 0, tokenizer, text, top)
    assert cold.logprobs.tokens == warm.logprobs.tokens
    assert cold.logprobs.text_offset == warm.logprobs.text_offset
    assert cold.logprobs.tokens[len(ids) :] == plain.logprobs.tokens
    for one, other in zip(cold.logprobs.token_logprobs[1:], warm.logprobs.token_logprobs[1:], strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    table = reference(model_folder("llama")).logits(ids).log_softmax(dim=-1)
    for place, score in enumerate(cold.logprobs.token_logprobs[1 : len(ids)], start=1):
        assert score == pytest.approx(float(table[place - 1, ids[place]]), abs=TOLERANCE)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.needs("openai.stream")
def test_streams_add_up(client: openai.OpenAI, echo: bool) -> None:
    """Pieces of a stream joined are the whole answer: text, and each of the four lists."""
    for prompt in PROMPTS:
        whole = ask(client, prompt=prompt, logprobs=2, echo=echo).choices[0]
        chunks = ask(client, prompt=prompt, logprobs=2, echo=echo, stream=True)
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert "".join(choice.text for choice in choices) == whole.text
        for name in ("tokens", "text_offset"):
            joined = [item for choice in choices for item in getattr(choice.logprobs, name)]
            assert joined == getattr(whole.logprobs, name)
        joined = [score for choice in choices for score in choice.logprobs.token_logprobs]
        assert len(joined) == len(whole.logprobs.token_logprobs)


def test_a_prompt_is_scored_without_an_answer(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """What evaluations ask: echo, logprobs, no tokens."""
    [choice] = ask(client, prompt=PROMPTS[0], echo=True, logprobs=1, max_tokens=0).choices
    assert choice.text == PROMPTS[0] and choice.finish_reason == "length"
    assert "".join(choice.logprobs.tokens) == PROMPTS[0]
    check(choice.logprobs, choice.text, 0, tokenizer, PROMPTS[0], 1)


def test_a_special_token_before_the_text(servers: ServerFactory, stage: str) -> None:
    """A tokenizer that puts one before every prompt: it is listed, but the text begins after it."""
    server = servers(stage, "mistral")
    body = {"prompt": "The quick", "echo": True, "logprobs": 1, "max_tokens": 4, "temperature": 0}
    choice = server.client.post("/v1/completions", json=body).json()["choices"][0]
    lists = choice["logprobs"]
    assert lists["tokens"][0] == "<|endoftext|>" and choice["text"].startswith("The quick")
    assert lists["text_offset"][:2] == [0, 0]
    for token, offset in zip(lists["tokens"][1:], lists["text_offset"][1:], strict=True):
        if "\ufffd" not in token and not token.startswith("<|"):
            assert choice["text"][offset : offset + len(token)] == token


def test_what_a_stop_string_cut_off_is_still_listed(client: openai.OpenAI) -> None:
    text = ask(client, prompt="Counting:", max_tokens=40).choices[0].text
    stop = next(text[i : i + 2] for i in range(10, len(text)) if "\ufffd" not in text[i : i + 2])
    answer = ask(client, prompt="Counting:", max_tokens=40, stop=[stop], logprobs=0)
    [choice] = answer.choices
    assert choice.text == text[: text.index(stop)]
    assert len(choice.logprobs.tokens) == answer.usage.completion_tokens


def test_bad_wishes_are_refused(server: ServerDriver) -> None:
    with probe(server):
        for fields, named in (
            ({"logprobs": 6}, "logprobs"),
            ({"logprobs": -1}, "logprobs"),
            ({"logprobs": True}, "logprobs"),
            ({"logprobs": 1.5}, "logprobs"),
            ({"logprobs": 10**30}, "logprobs"),
            ({"echo": 1}, "echo"),
            ({"echo": "yes"}, "echo"),
        ):
            error = is_error(server.client.post("/v1/completions", json={"prompt": "hi", **fields}))
            assert error["param"] == named and named in error["message"]


def test_nulls_are_defaults(server: ServerDriver) -> None:
    body = {"prompt": "hi", "max_tokens": 2, "echo": None, "logprobs": None, "n": None}
    choice = server.client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["logprobs"] is None and not choice["text"].startswith("hi")


@pytest.mark.needs("openai.chat")
def test_chats_have_no_echo(server: ServerDriver) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    error = is_error(server.client.post("/v1/chat/completions", json={**chat, "echo": True}))
    assert error["param"] == "echo"
    for neutral in (None, False):
        response = server.client.post(
            "/v1/chat/completions", json={**chat, "echo": neutral, "logprobs": neutral}
        )
        assert response.status_code == 200


@pytest.mark.needs("openai.chat")
def test_chats_say_which_stage_scores_them(server: ServerDriver, stage: str) -> None:
    if "openai.chat_logprobs" in DIALECTS[stage].capabilities:
        return
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    assert "v0.3" in is_error(server.client.post("/v1/chat/completions", json=chat))["message"]


def test_echo_costs_no_cache(server: ServerDriver) -> None:
    """Only log probabilities of the prompt need it computed; echo alone, or those of the answer, do not."""
    text = "something that is cached by now " * 3
    generate(server, text=text, sampling_params={"max_new_tokens": 1})
    for fields, is_cached in (
        ({"echo": True}, True),
        ({"logprobs": 2}, True),
        ({"echo": True, "logprobs": 2}, False),
    ):
        answer = server.client.post(
            "/v1/completions", json={"prompt": text, "max_tokens": 2, **fields}
        ).json()
        assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) is is_cached
