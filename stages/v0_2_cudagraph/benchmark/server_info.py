"""What a run must know of the server before it starts: the model's name, its vocabulary, where its tokenizer is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ..hf_transformers_utils import Tokenizer, get_tokenizer
from .client import error_message

INFO_TIMEOUT_S = 30.0


class BenchError(Exception):
    """The run can't go on; the text is one line that says why."""


@dataclass(frozen=True)
class ServerInfo:
    """What the server says of itself; a server that is no Strata has only a model."""

    model: str
    details: dict[str, Any] = field(default_factory=dict)
    """Of a Strata server: the answer of `/get_model_info`."""

    @property
    def vocab_size(self) -> int | None:
        return self.details.get("vocab_size")

    def find_tokenizer(self, path: str | None) -> Tokenizer | None:
        """The one in the folder ``path``, else the server's own if it is on this machine, else None.

        Raises ``ValueError`` if ``path`` holds none.
        """
        if path is not None:
            return get_tokenizer(path)
        folder = self.details.get("tokenizer_path")
        if folder is not None and (Path(folder) / "tokenizer.json").is_file():
            return get_tokenizer(folder)
        return None


async def ask_server(http: httpx.AsyncClient, model: str | None) -> ServerInfo:
    """Who serves ``model`` (default: the first one listed); raises `BenchError` if nobody answers."""
    listed = await _get(http, "/v1/models")
    if model is None:
        try:
            model = str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise BenchError(f"{http.base_url} lists no model: name one with --model.") from None
    try:
        details = await _get(http, "/get_model_info")
    except BenchError:
        details = {}
    return ServerInfo(model, details)


async def flush_cache(http: httpx.AsyncClient) -> None:
    """Have a Strata server forget its cached prefixes; raises `BenchError` if it won't."""
    await _request(http, "POST", "/flush_cache")


async def _get(http: httpx.AsyncClient, path: str) -> Any:
    response = await _request(http, "GET", path)
    try:
        return response.json()
    except ValueError:
        raise BenchError(f"{path} of {http.base_url} answers with no JSON: is this a model server?") from None


async def _request(http: httpx.AsyncClient, method: str, path: str) -> httpx.Response:
    try:
        response = await http.request(method, path, timeout=INFO_TIMEOUT_S)
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise BenchError(f"no server answers at {http.base_url} ({reason}): start one first.") from error
    if response.status_code == 401:
        raise BenchError(f"{http.base_url} wants a key: pass --api-key.")
    if response.status_code != 200:
        raise BenchError(f"{path} of {http.base_url}: HTTP {response.status_code}: {error_message(response)}")
    return response
