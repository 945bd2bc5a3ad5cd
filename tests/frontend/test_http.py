"""The HTTP surface around the fake router: answers, streams, lists, disconnects, limits, keys."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from .conftest import FakeServer

KEY = "sk-secret-ünïcode"


def sse(response: httpx.Response) -> list[Any]:
    """The events of a stream; it must end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def client_of(server: FakeServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def test_generate_answers_with_text_and_meta_info(server: FakeServer) -> None:
    body = {"text": "the quick", "sampling_params": {"max_new_tokens": 3}, "rid": "mine"}
    assert server.client.post("/generate", json=body).json() == {
        "text": "the quickthe",
        "meta_info": {
            "id": "mine",
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "cached_tokens": 0,
            "finish_reason": {"type": "length", "length": 3},
        },
    }
    assert server.client.put("/generate", json=body).status_code == 200


@pytest.mark.parametrize("stop", [None, "quick", ["x", "ick the"], "ickthe\u0001", ["qu", "quick"]])
@pytest.mark.parametrize("text", ["the quick", "🤗 é 中文 नमस्ते"])
def test_inv_text_a_stream_is_cumulative_and_ends_as_the_plain_answer(
    server: FakeServer, text: str, stop: Any
) -> None:
    body = {"text": text, "rid": "r", "sampling_params": {"max_new_tokens": 30, "stop": stop}}
    plain = server.client.post("/generate", json=body).json()
    events = sse(server.client.post("/generate", json=body | {"stream": True}))
    texts = [event["text"] for event in events]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert all("\ufffd" not in shown for shown in texts[:-1])
    assert events[-1] == plain
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    if isinstance(stop, str) and "\u0001" not in stop and stop in text:
        assert plain["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert stop not in plain["text"]


def test_special_tokens_are_skipped_for_each_request_by_itself(server: FakeServer) -> None:
    params = [{"skip_special_tokens": skip, "max_new_tokens": 2} for skip in (True, False)]
    body = {"text": ["a<|im_end|>"] * 2, "sampling_params": params}
    assert [output["text"] for output in server.client.post("/generate", json=body).json()] == [
        "a",
        "a<|im_end|>",
    ]


def test_a_list_answers_in_order_and_its_items_run_together(server: FakeServer) -> None:
    texts = ["a b c", "the", "dog"] * 10
    lengths = [60 - i for i in range(30)]
    params = [{"max_new_tokens": n} for n in lengths]
    started = time.monotonic()
    outputs = server.client.post("/generate", json={"text": texts, "sampling_params": params}).json()
    assert time.monotonic() - started < 0.002 * sum(lengths) / 2, "items waited for each other"
    assert [output["meta_info"]["completion_tokens"] for output in outputs] == lengths
    assert [output["text"][0] for output in outputs] == ["a", "t", "d"] * 10


def test_a_list_streams_with_an_index(server: FakeServer) -> None:
    body = {"input_ids": [[65], [66]], "stream": True, "sampling_params": {"max_new_tokens": 3}}
    events = sse(server.client.post("/generate", json=body))
    for index in (0, 1):
        mine = [event for event in events if event["index"] == index]
        assert mine[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
        assert len(mine[-1]["text"]) == 3


def test_a_single_id_list_is_one_prompt_and_a_list_of_one_is_a_list(server: FakeServer) -> None:
    params = {"max_new_tokens": 1}
    assert isinstance(
        server.client.post("/generate", json={"input_ids": [65], "sampling_params": params}).json(), dict
    )
    for prompts in ({"input_ids": [[65]]}, {"text": ["a"]}):
        assert isinstance(
            server.client.post("/generate", json=prompts | {"sampling_params": params}).json(), list
        )


def test_max_new_tokens_0_is_empty_and_length(server: FakeServer) -> None:
    output = server.client.post(
        "/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 0}}
    ).json()
    assert (output["text"], output["meta_info"]["finish_reason"]["type"]) == ("", "length")
    assert output["meta_info"]["completion_tokens"] == 0


# -- OpenAI ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt", ["a b c", ["the quick", "a b c", "dog"], [65, 66], [[65, 66], [67]]], ids=lambda p: str(p)[:20]
)
def test_completions_with_the_openai_client_stream_and_not(server: FakeServer, prompt: Any) -> None:
    client = client_of(server)
    plain = client.completions.create(model="any name", prompt=prompt, max_tokens=5)
    texts = [choice.text for choice in plain.choices]
    assert [choice.index for choice in plain.choices] == list(range(len(texts)))
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 5 * len(texts)
    assert plain.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens
    assert plain.model == "any name"
    joined, reasons = [""] * len(texts), [""] * len(texts)
    for chunk in client.completions.create(model="m", prompt=prompt, max_tokens=5, stream=True):
        [choice] = chunk.choices
        joined[choice.index] += choice.text
        assert not reasons[choice.index], "text after the end"
        reasons[choice.index] = choice.finish_reason or ""
    assert joined == texts
    assert reasons == ["length"] * len(texts)


def test_completions_default_to_16_tokens_and_chat_to_the_limit(server: FakeServer) -> None:
    client = client_of(server)
    assert client.completions.create(model="m", prompt="a").usage.completion_tokens == 16  # type: ignore[union-attr]
    answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert answer.usage is not None
    assert answer.usage.total_tokens == 256


def test_chat_completions_with_the_openai_client_stream_and_not(server: FakeServer) -> None:
    client = client_of(server)
    messages: Any = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "dog 🤗"}]},
    ]
    options: Any = {"model": "m", "messages": messages, "max_completion_tokens": 40}
    options["extra_body"] = {"skip_special_tokens": False}
    plain = client.chat.completions.create(**options)
    # The fake router echoes the prompt, so the answer shows what the template made of the messages.
    assert plain.choices[0].message.content.startswith(
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nthe dog 🤗"
    )
    assert plain.choices[0].message.role == "assistant"
    assert plain.choices[0].finish_reason == "length"
    chunks = list(client.chat.completions.create(stream=True, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == plain.choices[0].message.content
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_openai_client_sees_its_own_error_types(server: FakeServer) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client_of(server).completions.create(model="m", prompt="a", max_tokens=-1)
    [model] = client_of(server).models.list().data
    assert model.id == "tiny-model"


# -- clients that go away --------------------------------------------------------------------------------

LONG = {"sampling_params": {"max_new_tokens": 200}}
SHAPES: dict[str, tuple[str, dict[str, Any], int]] = {
    "plain": ("/generate", {"text": "the"} | LONG, 1),
    "stream": ("/generate", {"text": "the", "stream": True} | LONG, 1),
    "list": ("/generate", {"text": ["the"] * 10} | LONG, 10),
    "streamed list": ("/v1/completions", {"prompt": ["the"] * 10, "max_tokens": 200, "stream": True}, 10),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}, 1),
}
"""Route, body, and how many prompts it holds."""


async def post_and_go(client: httpx.AsyncClient, path: str, body: dict[str, Any], after_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(after_s):
            await client.post(path, json=body)


@pytest.mark.parametrize("name", SHAPES)
def test_inv_free_a_client_that_goes_away_ends_every_item_at_once(slow_server: FakeServer, name: str) -> None:
    path, body, count = SHAPES[name]
    before = slow_server.state()

    async def run() -> None:
        async with httpx.AsyncClient(base_url=slow_server.url, trust_env=False) as client:
            await post_and_go(client, path, body, 0.35)

    asyncio.run(run())
    assert slow_server.wait_idle() < 0.5
    after = slow_server.state()
    assert after["seen"] - before["seen"] == count
    assert after["aborted"] - before["aborted"] == count


@pytest.fixture(scope="module")
def slow_server(model_folder: Path) -> Iterator[FakeServer]:
    with FakeServer(model_folder, FAKE_ROUTER_STEP_S="0.1") as server:
        yield server.wait_ready()
        assert "Traceback" not in server.log, server.log


def test_200_clients_that_go_away_at_random_leave_nothing(server: FakeServer) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
            shapes = list(SHAPES.values())
            delays = [0.002 + 0.0005 * (i % 97) for i in range(200)]
            await asyncio.gather(
                *[post_and_go(client, *shapes[i % 5][:2], after_s=delay) for i, delay in enumerate(delays)]
            )

    asyncio.run(run())
    server.wait_idle()
    assert server.client.post(
        "/generate", json={"text": "the", "sampling_params": {"max_new_tokens": 1}}
    ).json()["text"]


def test_a_name_in_flight_is_refused_and_free_again_later(slow_server: FakeServer) -> None:
    body = {"text": "the", "rid": "same", "sampling_params": {"max_new_tokens": 8}}
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(slow_server.client.post, "/generate", json=body)
        time.sleep(0.3)
        refused = slow_server.client.post("/generate", json=body)
        assert (refused.status_code, "rid" in refused.json()["error"]["message"]) == (400, True)
        assert first.result().status_code == 200
    assert slow_server.client.post("/generate", json=body).status_code == 200


def test_one_bad_prompt_fails_the_call_and_nothing_of_it_starts(server: FakeServer) -> None:
    before = server.state()["seen"]
    assert server.client.post("/v1/completions", json={"prompt": ["a", "b", ""]}).status_code == 400
    assert server.state()["seen"] == before


# -- limits ----------------------------------------------------------------------------------------------


def test_a_body_over_the_limit_is_a_413_declared_or_chunked(server: FakeServer) -> None:
    body = b'{"text": "' + b"x" * (17 << 20) + b'"}'
    for content in (body, iter([body[i : i + 65536] for i in range(0, len(body), 65536)])):
        response = server.client.post("/generate", content=content)
        assert response.status_code == 413
        assert str(16 << 20) in response.json()["error"]["message"]
    assert server.client.get("/health").status_code == 200


def raw(server: FakeServer, data: bytes) -> bytes:
    """What comes back, until the server closes, for raw bytes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(data)
        received = b""
        with contextlib.suppress(OSError):
            while piece := connection.recv(65536):
                received += piece
        return received


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\nx: " + b"y" * 200_000,
        b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 40_000,
        b"GET /" + b"y" * 200_000,
    ],
    ids=["one endless header", "endless headers", "endless path"],
)
def test_endless_request_heads_are_cut_off(server: FakeServer, data: bytes) -> None:
    answer = raw(server, data)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert server.client.get("/health").status_code == 200


def test_what_is_no_http_gets_the_error_object_too(server: FakeServer) -> None:
    head, _, body = raw(server, b"\x00\xff no http\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_long_prompt_is_tokenized_without_holding_up_others(server: FakeServer) -> None:
    prompts = ["the quick brown fox " * 40] * 1000
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(server.client.post, "/v1/completions", json={"prompt": prompts, "max_tokens": 0})
        slowest = 0.0
        while not long.done():
            started = time.monotonic()
            assert server.client.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - started)
        assert long.result().status_code == 200
    assert slowest < 1.0, slowest


def test_flush_is_refused_while_something_runs(slow_server: FakeServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(slow_server.client.post, "/generate", json={"text": "a", "sampling_params": {}})
        time.sleep(0.3)
        assert slow_server.client.post("/flush_cache").status_code == 400
        running.result()
    for method in ("GET", "POST"):
        assert slow_server.client.request(method, "/flush_cache").json() == {"success": True}


# -- keys ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked_server(model_folder: Path) -> Iterator[FakeServer]:
    with FakeServer(model_folder, "--api-key", KEY, "--log-level", "debug") as server:
        yield server.wait_ready()


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", KEY])
def test_without_the_key_every_route_but_health_is_a_401(
    locked_server: FakeServer, given: str | None
) -> None:
    headers = [] if given is None else [(b"authorization", given.encode())]
    for path in (
        "/get_server_args",
        "/get_internal_state",
        "/v1/models",
        "/generate",
        "/flush_cache",
        "/nothing",
    ):
        response = locked_server.client.get(path, headers=headers)
        assert response.status_code == 401, path
        assert response.json()["error"]["type"] == "authentication_error"
    assert (
        locked_server.client.post("/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 401
    )
    assert locked_server.client.get("/health", headers=headers).status_code == 200


def test_with_the_key_all_is_open_and_the_key_is_never_shown(locked_server: FakeServer) -> None:
    headers = [(b"authorization", f"bearer {KEY}".encode())]
    for path in ("/get_server_args", "/get_model_info", "/get_internal_state", "/v1/models"):
        response = locked_server.client.get(path, headers=headers)
        assert response.status_code == 200
        assert "secret" not in response.text
    assert locked_server.client.get("/get_server_args", headers=headers).json()["port"] > 0
    assert "secret" not in locked_server.log
    for process in locked_server.tree()[1:]:
        assert "secret" not in " ".join(process.cmdline())
