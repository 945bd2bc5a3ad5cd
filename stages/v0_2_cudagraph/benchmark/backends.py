"""The dialects of HTTP that the load generator speaks: what a request looks like, and what an event says.

Stateless; one table, read by `client`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from ..hf_transformers_utils import Tokenizer
from .datasets import BenchRequest


@dataclass(frozen=True)
class RequestOptions:
    """What all requests of a run have in common."""

    model: str
    ignore_eos: bool = True
    tokenizer: Tokenizer | None = None
    """Writes prompts as text, for chat."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields of every body; they replace those of the same name."""


@dataclass(frozen=True)
class StreamEvent:
    """What one event of a stream says; counts are of the whole answer so far, None where it does not say."""

    has_text: bool
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str = ""


@dataclass(frozen=True)
class Backend:
    """One dialect: where requests go, how to write them, how to read events."""

    path: str
    make_body: Callable[[BenchRequest, RequestOptions], dict[str, Any]]
    read_event: Callable[[dict[str, Any]], StreamEvent]
    needs_text: bool = False
    """Whether prompts must be text rather than token ids."""


def _generate_body(request: BenchRequest, options: RequestOptions) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": request.output_len, "ignore_eos": options.ignore_eos}
    return {"input_ids": request.prompt_ids, "sampling_params": params, "stream": True} | options.extra_body


def _openai_body(request: BenchRequest, options: RequestOptions) -> dict[str, Any]:
    body = {"model": options.model, "max_tokens": request.output_len, "temperature": 0, "stream": True}
    if options.ignore_eos:  # no field of OpenAI's own
        body["ignore_eos"] = True
    return body


def _completion_body(request: BenchRequest, options: RequestOptions) -> dict[str, Any]:
    return _openai_body(request, options) | {"prompt": request.prompt_ids} | options.extra_body


def _chat_body(request: BenchRequest, options: RequestOptions) -> dict[str, Any]:
    assert options.tokenizer is not None, "chat needs text"
    message = {"role": "user", "content": options.tokenizer.decode(request.prompt_ids)}
    return _openai_body(request, options) | {"messages": [message]} | options.extra_body


def _read_generate(event: dict[str, Any]) -> StreamEvent:
    meta = event["meta_info"]
    finish = meta.get("finish_reason") or {}
    return StreamEvent(
        has_text=bool(event["text"]),
        output_tokens=meta.get("completion_tokens"),
        prompt_tokens=meta.get("prompt_tokens"),
        cached_tokens=meta.get("cached_tokens"),
        finish_reason=finish.get("type"),
        error=str(finish.get("message", "aborted")) if finish.get("type") == "abort" else "",
    )


def _read_openai(event: dict[str, Any], text_of: Callable[[dict[str, Any]], str | None]) -> StreamEvent:
    usage = event.get("usage") or {}
    choice = (event.get("choices") or [{}])[0]
    finish_reason = choice.get("finish_reason")
    return StreamEvent(
        has_text=bool(text_of(choice)),
        output_tokens=usage.get("completion_tokens"),
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        finish_reason=finish_reason,
        error="aborted" if finish_reason == "abort" else "",
    )


def _read_completion(event: dict[str, Any]) -> StreamEvent:
    return _read_openai(event, lambda choice: choice.get("text"))


def _read_chat(event: dict[str, Any]) -> StreamEvent:
    return _read_openai(event, lambda choice: choice.get("delta", {}).get("content"))


BACKENDS: Final[dict[str, Backend]] = {
    "strata": Backend("/generate", _generate_body, _read_generate),
    "openai": Backend("/v1/completions", _completion_body, _read_completion),
    "openai-chat": Backend("/v1/chat/completions", _chat_body, _read_chat, needs_text=True),
}
