"""One request against a server that behaves badly: each fate has its error, and good answers their numbers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.v0_2_cudagraph.benchmark.backends import BACKENDS, RequestOptions
from stages.v0_2_cudagraph.benchmark.client import Answer, EventSplitter, StreamFailure, send
from stages.v0_2_cudagraph.benchmark.datasets import BenchRequest
from stages.v0_2_cudagraph.benchmark.metrics import RequestResult
from stages.v0_2_cudagraph.hf_transformers_utils import get_tokenizer
from tests.models.tiny import tiny_llama

from .stub_server import PAUSE_S, StubServer

REQUEST = BenchRequest([5, 6, 7], 4)
OPTIONS = RequestOptions("stub")
ALPHABET = 'az:{"\\\n\r\x0b\x0c\x1c\x85\u2028\u2029é中🤗'
"""Of texts in events: what JSON escapes, what Unicode breaks lines at, characters of one to four bytes."""


def ask(url: str, timeout: float = 10.0) -> RequestResult:
    async def run() -> RequestResult:
        async with httpx.AsyncClient(base_url=url, timeout=timeout, trust_env=False) as http:
            return await send(http, BACKENDS["strata"], REQUEST, OPTIONS)

    return asyncio.run(run())


def test_a_whole_answer() -> None:
    with StubServer(["slow"]) as server:
        result = ask(server.url)
    assert result.error == ""
    assert (result.prompt_tokens, result.output_tokens, result.cached_tokens) == (7, 4, 3)
    assert result.ttft is not None and result.ttft >= PAUSE_S * 0.9
    assert len(result.itl) == 3 and result.tpot is not None
    assert result.latency >= 4 * PAUSE_S * 0.9
    assert server.bodies == [
        {
            "input_ids": [5, 6, 7],
            "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
            "stream": True,
        }
    ]


def test_tokens_that_come_at_once() -> None:
    with StubServer(["burst"]) as server:
        result = ask(server.url)
    assert (result.error, result.output_tokens, result.itl, result.tpot) == ("", 4, [], None)


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("500", "HTTP 500: out of luck"),
        ("html", "HTTP 502: <html>bad gateway</html>"),
        ("cut", "the stream ended before [DONE]"),
        ("short", "peer closed connection"),
        ("garbage", "an event is not what /generate sends: {no json"),
        ("stranger", 'an event is not what /generate sends: {"choices": []}'),
        ("error", "a process died"),
        ("abort", "the pool is full"),
    ],
)
def test_each_way_to_fail_has_its_error(way: str, says: str) -> None:
    with StubServer([way]) as server:
        result = ask(server.url)
    assert says in result.error
    assert result.output_tokens == 0 and not result.itl


def test_silence_ends_with_the_timeout() -> None:
    with StubServer(["silent"]) as server:
        assert ask(server.url, timeout=0.3).error == "ReadTimeout"


def test_no_server_is_an_error_too() -> None:
    assert "connection" in ask("http://127.0.0.1:9").error


@given(st.lists(st.text(ALPHABET), max_size=8), st.lists(st.integers(1, 9)))
def test_events_are_found_however_the_body_arrives(texts: list[str], cuts: list[int]) -> None:
    """One event a text, whatever characters it has, cut into pieces of any size."""
    events = [json.dumps({"t": text}, ensure_ascii=False) for text in texts]
    body = "".join(f"data: {event}\n\n" for event in events).encode()
    splitter, found = EventSplitter(), []
    for size in [*cuts, len(body)]:
        piece, body = body[:size], body[size:]
        found += list(splitter.feed(piece))
    assert [json.loads(data) for data in found] == [{"t": text} for text in texts]


def read(backend: str, *events: dict[str, Any], asked: int = 4) -> RequestResult:
    """The result of a stream of these events, one a second."""
    answer = Answer(BenchRequest([1, 2, 3], asked))
    for number, event in enumerate(events, start=1):
        answer.add(float(number), BACKENDS[backend].read_event(event))
    return answer.result(0.0, float(len(events)))


def chat(content: str | None = None, finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    delta = {} if content is None else {"content": content}
    return {"choices": [{"delta": delta, "finish_reason": finish_reason}], **more}


def test_without_counts_a_piece_is_a_token_and_a_length_is_what_was_asked() -> None:
    """A piece may hold several tokens where a character takes more than one, so pieces may be too few."""
    result = read("openai-chat", chat(""), chat("a"), chat("b"), chat(finish_reason="length"))
    assert (result.prompt_tokens, result.output_tokens) == (3, 4)
    assert (result.ttft, result.itl, result.latency) == (2.0, [1.0], 3.0)
    assert read("openai-chat", chat("a"), chat("b"), chat(finish_reason="stop")).output_tokens == 2


def test_a_count_at_the_end_is_taken_for_the_total_alone() -> None:
    """What `stream_options.include_usage` adds: one more event, without a choice."""
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
    result = read(
        "openai-chat", chat("a"), chat("b"), chat(finish_reason="stop"), {"choices": [], "usage": usage}
    )
    assert (result.prompt_tokens, result.cached_tokens, result.output_tokens) == (9, 8, 3)
    assert (result.itl, result.latency) == ([1.0], 2.0)


def test_counts_in_every_event_are_followed() -> None:
    def event(text: str, count: int) -> dict[str, Any]:
        usage = {"prompt_tokens": 9, "completion_tokens": count}
        return {"choices": [{"text": text, "finish_reason": None}], "usage": usage}

    result = read("openai", event("a", 1), event("", 2), event("xyz", 4))
    assert (result.output_tokens, result.ttft, result.itl) == (4, 1.0, [1.0, 0.5, 0.5])


def test_an_aborted_answer_is_a_failure_for_openai_too() -> None:
    with pytest.raises(StreamFailure, match="aborted"):
        read("openai", {"choices": [{"text": "a", "finish_reason": "abort"}]})


def test_bodies_of_the_openai_routes() -> None:
    tokenizer = get_tokenizer(str(tiny_llama("llama")))
    ids = tokenizer.encode("The quick brown fox")
    options = RequestOptions("m", False, tokenizer, {"temperature": 1, "stream_options": {}})
    body = BACKENDS["openai"].make_body(BenchRequest(ids, 4), options)
    common = {"model": "m", "max_tokens": 4, "temperature": 1, "stream": True, "stream_options": {}}
    assert body == {**common, "prompt": ids}
    body = BACKENDS["openai-chat"].make_body(BenchRequest(ids, 4), options)
    assert body == {**common, "messages": [{"role": "user", "content": "The quick brown fox"}]}
    assert BACKENDS["openai"].make_body(REQUEST, OPTIONS)["ignore_eos"] is True
