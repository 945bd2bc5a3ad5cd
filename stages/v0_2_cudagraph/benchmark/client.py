"""Sends one request and notes when its tokens arrive. Nothing that a server does raises: it becomes an error.

The HTTP client belongs to the run; everything else lives as long as its request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from .backends import Backend, RequestOptions, StreamEvent
from .datasets import BenchRequest
from .metrics import Arrival, RequestResult, time_tokens

DONE = b"[DONE]"
MAX_ERROR_LENGTH = 300


class StreamFailure(Exception):
    """The answer can't be used; the text says why."""


class EventSplitter:
    """Cuts a body, as it arrives, into the data of its server-sent events.

    Only a newline ends a line here: text in an event may hold any other character that Unicode breaks lines at.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()


@dataclass
class Answer:
    """What has come of one answer so far."""

    asked: BenchRequest
    arrivals: list[Arrival] = field(default_factory=list)
    pieces: int = 0
    is_counted: bool = False
    """Whether events say how many tokens have come, as the first one shows; else a piece of text counts as one."""
    latest: dict[str, Any] = field(default_factory=dict)
    """The newest value of each field of the events that say something."""

    def add(self, now: float, event: StreamEvent) -> None:
        if event.error:
            raise StreamFailure(event.error)
        if not self.arrivals:
            self.is_counted = event.output_tokens is not None
        self.pieces += event.has_text
        for name in ("output_tokens", "prompt_tokens", "cached_tokens", "finish_reason"):
            if (value := getattr(event, name)) is not None:
                self.latest[name] = value
        count = self.latest["output_tokens"] if self.is_counted else self.pieces
        self.arrivals.append(Arrival(now, count))

    def result(self, sent: float, ended: float) -> RequestResult:
        times: dict[str, Any] = time_tokens(sent, self.arrivals or [Arrival(ended, 0)])
        return RequestResult(
            prompt_tokens=self.latest.get("prompt_tokens", len(self.asked.prompt_ids)),
            output_tokens=self._output_tokens(),
            cached_tokens=self.latest.get("cached_tokens", 0),
            **times,
        )

    def _output_tokens(self) -> int:
        """As the server says, at the latest in the end; one that ended for its length has what was asked for."""
        if "output_tokens" in self.latest:
            return self.latest["output_tokens"]
        return self.asked.output_len if self.latest.get("finish_reason") == "length" else self.pieces


async def send(
    http: httpx.AsyncClient, backend: Backend, request: BenchRequest, options: RequestOptions
) -> RequestResult:
    """Send ``request`` and follow its answer to the end."""
    answer = Answer(request)
    body = json.dumps(backend.make_body(request, options))
    sent = time.perf_counter()
    try:
        await _follow(http, backend, body, answer)
    except (httpx.HTTPError, httpx.InvalidURL, StreamFailure) as error:
        return RequestResult(len(request.prompt_ids), error=str(error) or type(error).__name__)
    return answer.result(sent, time.perf_counter())


async def _follow(http: httpx.AsyncClient, backend: Backend, body: str, answer: Answer) -> None:
    """Add the stream's events to ``answer`` as they come; raises `StreamFailure` or an httpx error."""
    headers = {"content-type": "application/json"}
    async with http.stream("POST", backend.path, content=body, headers=headers) as response:
        if response.status_code != 200:
            await response.aread()
            raise StreamFailure(f"HTTP {response.status_code}: {error_message(response)}")
        splitter, is_done = EventSplitter(), False
        async for received in response.aiter_bytes():
            now = time.perf_counter()
            for data in splitter.feed(received):
                if data == DONE:
                    is_done = True
                else:
                    answer.add(now, _read(backend, data))
        if not is_done:
            raise StreamFailure("the stream ended before [DONE]")


def _read(backend: Backend, data: bytes) -> StreamEvent:
    try:
        event = json.loads(data)
        if "error" in event:
            return StreamEvent(has_text=False, error=_message(event))
        return backend.read_event(event)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        shown = data[:MAX_ERROR_LENGTH].decode(errors="replace")
        raise StreamFailure(f"an event is not what {backend.path} sends: {shown}") from error


def error_message(response: httpx.Response) -> str:
    """What a refused request was told: the message of OpenAI's error object, or the beginning of the body."""
    try:
        return _message(response.json())
    except ValueError:
        return response.text[:MAX_ERROR_LENGTH]


def _message(answer: Any) -> str:
    match answer:
        case {"error": {"message": message}} | {"error": message} | {"message": message}:
            return str(message)
    return str(answer)[:MAX_ERROR_LENGTH]
