"""A small streaming client of ``/v1/chat/completions``, enough for `chat` and `tour`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from .errors import UserError

Message = dict[str, str]


class Refused(UserError):
    """The server answered, with an error; it may well take the next request."""


@dataclass
class ChatClient:
    """Talks to one server. ``url`` may end in ``/v1`` or not; ``max_tokens`` and ``temperature`` are fixed."""

    url: str
    api_key: str | None = None
    max_tokens: int = 512
    temperature: float = 0.0
    _http: httpx.Client = field(init=False, repr=False)

    def __post_init__(self) -> None:
        headers = {b"Authorization": f"Bearer {self.api_key}".encode()} if self.api_key else {}
        try:
            # No proxies: the server is this machine or one that the user named. The first token of a long
            # conversation may take minutes on a CPU.
            self._http = httpx.Client(
                base_url=self.url.rstrip("/").removesuffix("/v1"),
                headers=headers,
                timeout=httpx.Timeout(600.0, connect=5.0),
                trust_env=False,
            )
        except httpx.InvalidURL as error:
            raise self._no_server(error) from error

    def close(self) -> None:
        self._http.close()

    def model_name(self) -> str:
        """The first model that the server lists; raises ``UserError`` if there is no such server."""
        return self._checked(self._request("GET", "/v1/models"))["data"][0]["id"]

    def generated_tokens(self) -> int:
        """How many tokens the engine has generated since its start."""
        return self._checked(self._request("GET", "/get_internal_state"))["generated_tokens"]

    def stream(self, model: str, messages: list[Message]) -> Iterator[str]:
        """Yield the pieces of the answer as they come. Leaving early closes the connection: an abort."""
        body = {
            "model": model,
            "messages": messages,
            "stream": True,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    self._checked(response)
                yield from self._pieces(response)
        except httpx.HTTPError as error:
            raise UserError(f"lost the server at {self.url} ({error or type(error).__name__})") from error

    def _pieces(self, response: httpx.Response) -> Iterator[str]:
        for line in response.iter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise Refused(f"the server says: {_message(chunk)}")
            for choice in chunk.get("choices", []):
                if piece := choice.get("delta", {}).get("content"):
                    yield piece

    def _request(self, method: str, path: str) -> httpx.Response:
        try:
            return self._http.request(method, path)
        except httpx.HTTPError as error:
            raise self._no_server(error) from error

    def _no_server(self, error: Exception) -> UserError:
        reason = str(error) or type(error).__name__
        return UserError(f"no server answers at {self.url} ({reason})", "Start one: strata serve latest")

    def _checked(self, response: httpx.Response) -> Any:
        try:
            answer = response.json()
        except ValueError:
            raise UserError(f"{self.url} answers, but is no Strata server") from None
        if response.status_code == 401:
            raise UserError(f"the server at {self.url} wants a key", "Pass --api-key or set STRATA_API_KEY")
        if response.status_code != 200:
            raise Refused(f"the server says: {_message(answer)}")
        return answer


def _message(answer: Any) -> str:
    """The message of an OpenAI error object, or whatever came in its place."""
    match answer:
        case {"error": {"message": message}} | {"error": message}:
            return str(message)
    return str(answer)


@dataclass
class Answer:
    """One answer and how fast it came; ``tokens_per_s`` leaves out the wait for the first token."""

    text: str
    ttft_s: float
    tokens: int
    tokens_per_s: float


def timed_answer(client: ChatClient, question: str) -> Answer:
    """Ask one question of an otherwise idle server. A piece may hold several tokens, so the engine counts them."""
    model = client.model_name()
    before = client.generated_tokens()
    started = first = time.perf_counter()
    pieces = list[str]()
    for piece in client.stream(model, [{"role": "user", "content": question}]):
        if not pieces:
            first = time.perf_counter()
        pieces.append(piece)
    decode_s = time.perf_counter() - first
    tokens = client.generated_tokens() - before
    return Answer("".join(pieces), first - started, tokens, (tokens - 1) / decode_s)
