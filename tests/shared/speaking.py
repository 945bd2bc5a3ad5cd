"""Helpers that speak HTTP to a server: streams, the state when idle, and the rule that every probe obeys."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai

from strata.adapters import ServerDriver

PROBE_LIMIT_S = 10.0
CANARY = {"text": "The quick brown fox", "sampling_params": {"temperature": 0, "max_new_tokens": 12}}


def generate(server: ServerDriver, **body: Any) -> Any:
    """The JSON answer of `/generate`, which must be a 200."""
    response = server.client.post("/generate", json=body)
    assert response.status_code == 200, f"{response.status_code} {response.text}"
    return response.json()


def openai_client(server: ServerDriver) -> openai.OpenAI:
    """The `openai` package's own client of a server without a key; it repeats no request."""
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=60)


def stream(server: ServerDriver, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a server-sent event stream; it must be well-formed and end with [DONE]."""
    with server.client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = b"".join(response.iter_raw())
    events = raw.decode().split("\n\n")
    assert events.pop() == "", "a stream ends with an empty line"
    assert all(event.startswith("data: ") for event in events)
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def internal_state(server: ServerDriver) -> dict[str, Any]:
    response = server.client.get("/get_internal_state")
    assert response.status_code == 200
    return response.json()


def wait_idle(server: ServerDriver, timeout_s: float = 10.0) -> dict[str, Any]:
    """The state once nothing runs or waits; INV-FREE must hold then."""
    deadline = time.monotonic() + timeout_s
    while True:
        state = internal_state(server)
        if state["running"] == state["waiting"] == 0:
            break
        assert time.monotonic() < deadline, f"never idle: {state}"
        time.sleep(0.02)
    assert state["free"] + state["evictable"] == state["size"], f"INV-FREE: {state}"
    assert state["protected"] == state["rows_used"] == 0, f"INV-FREE: {state}"
    return state


def canary(server: ServerDriver) -> str:
    """A fixed greedy answer, cold; whatever happened before, it must come out the same."""
    wait_idle(server)
    assert server.client.post("/flush_cache").status_code == 200
    state = internal_state(server)
    assert state["free"] == state["size"], f"INV-FREE: {state}"
    return generate(server, **CANARY)["text"]


@contextmanager
def probe(server: ServerDriver) -> Iterator[None]:
    """Pass rule of every probe: the canary's text before and after is equal, and the pool is whole again."""
    before = canary(server)
    yield
    assert canary(server) == before


def is_error(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of a refused request, which must be OpenAI-shaped."""
    assert response.status_code == status, f"{response.status_code} {response.text[:300]}"
    error = response.json()["error"]
    assert isinstance(error["message"], str) and error["message"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert response.elapsed.total_seconds() < PROBE_LIMIT_S
    return error
