"""OpenAI's completions and chat completions: their requests as structs, their answers as dicts.

Fields that OpenAI lacks (``top_k``, ``regex``, ``ignore_eos``, …) have the names of `SamplingParams`. Fields that
change nothing here (``user``, ``metadata``, …) are ignored; those of later stages are refused before
(`managers/request_parsing`). Any ``model`` name is taken: a server has one model.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

import msgspec

from .. import LATER_CHAT_PARAMETERS
from ..managers.call import Call, ReqState
from ..managers.generate_protocol import split_prompts
from ..managers.request_parsing import convert, parse_object, refuse_later_parameters
from ..managers.request_tokenizer import GenerateItem
from ..sampling_params import SamplingParams, Seed
from ..support.http_errors import bad_request

DEFAULT_MAX_TOKENS = 16
MAX_COMPLETION_LOGPROBS = 5
"""Most top tokens of a completion's ``logprobs``, as OpenAI has it; `/generate` lists more."""


class OpenAIRequest(msgspec.Struct, kw_only=True):
    """What both kinds of request share; null means the default, as OpenAI has it."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    n: int | None = None
    seed: Seed | None = None
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    regex: str | None = None
    dtype: Literal["int"] | None = None

    def to_sampling_params(self) -> SamplingParams:
        """Sampling parameters with ``max_new_tokens`` still at its default."""
        given = {name: getattr(self, name) for name in SHARED_PARAMETERS}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})


SHARED_PARAMETERS = tuple(set(OpenAIRequest.__struct_fields__).intersection(SamplingParams.__struct_fields__))
"""Fields that mean the same in `SamplingParams`."""


class CompletionRequest(OpenAIRequest, kw_only=True):
    """Body of `/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        return split_prompts(self.prompt, "prompt")

    def to_items(self) -> list[GenerateItem]:
        """One item per prompt, in order. The prompt is scored only if it is shown."""
        params = self.to_sampling_params()
        params.max_new_tokens = _count(self.max_tokens, "max_tokens", DEFAULT_MAX_TOKENS)
        num = _count(self.logprobs, "logprobs", 0)
        if num > MAX_COMPLETION_LOGPROBS:
            raise bad_request(f"logprobs must be in [0, {MAX_COMPLETION_LOGPROBS}], got {num}.", "logprobs")
        return [
            GenerateItem(
                prompt,
                params,
                "prompt",
                return_logprob=self.logprobs is not None,
                logprob_start_len=0 if self.echo else None,
                top_logprobs_num=num,
            )
            for prompt in self.prompts
        ]


class ContentPart(msgspec.Struct):
    """A piece of a message; this stage's chat takes text alone."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One turn of the conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None

    def to_dict(self, index: int) -> dict[str, Any]:
        """The form that chat templates expect, with the parts of the content joined."""
        content = self.content or ""
        if not isinstance(content, str):
            for part in content:
                if part.type != "text" or part.text is None:
                    param = f"messages[{index}].content"
                    raise bad_request(
                        f"{param}: only parts of type text are supported, got {part.type}.", param
                    )
            content = "".join(part.text or "" for part in content)
        message = {"role": self.role, "content": content}
        return message if self.name is None else message | {"name": self.name}


class ChatCompletionRequest(OpenAIRequest, kw_only=True):
    """Body of `/v1/chat/completions`; without a limit the answer may fill the context."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None

    def to_messages(self) -> list[dict[str, Any]]:
        """The conversation for the chat template."""
        if not self.messages:
            raise bad_request("messages must not be empty.", "messages")
        return [message.to_dict(index) for index, message in enumerate(self.messages)]

    def to_item(self, prompt: str) -> GenerateItem:
        """The one item of this request, given its rendered conversation."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        field = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        params = self.to_sampling_params()
        params.max_new_tokens = _count(limit, field, 0)
        # The template has written every special token that the model wants, BOS included.
        return GenerateItem(prompt, params, "messages", unlimited=limit is None, add_special_tokens=False)


def _count(value: int | None, param: str, default: int) -> int:
    if value is not None and value < 0:
        raise bad_request(f"{param} must be at least 0, got {value}.", param)
    return default if value is None else value


def parse_completion(body: bytes) -> CompletionRequest:
    """Decode and check a body of `/v1/completions`; raises `ApiError` 400."""
    content = parse_object(body)
    refuse_later_parameters(content)
    return convert(content, CompletionRequest)


def parse_chat(body: bytes) -> ChatCompletionRequest:
    """Decode and check a body of `/v1/chat/completions`; raises `ApiError` 400."""
    content = parse_object(body)
    refuse_later_parameters(content)
    refuse_later_parameters(content, table=LATER_CHAT_PARAMETERS)
    return convert(content, ChatCompletionRequest)


class AnswerHead:
    """What every object of one answer shares: id, kind, time, model."""

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        self._fields = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def with_choices(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return self._fields | {"choices": choices} | more


def completion_choice(state: ReqState, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": state.index, "text": text, "logprobs": logprobs, "finish_reason": finish_type(state)}


def chat_choice(state: ReqState) -> dict[str, Any]:
    message = {"role": "assistant", "content": state.text}
    return {"index": state.index, "message": message, "logprobs": None, "finish_reason": finish_type(state)}


def chat_delta(state: ReqState, delta: dict[str, str], is_last: bool = False) -> dict[str, Any]:
    reason = finish_type(state) if is_last else None
    return {"index": state.index, "delta": delta, "logprobs": None, "finish_reason": reason}


def finish_type(state: ReqState) -> str | None:
    """OpenAI names only how an answer ended; `/generate` says more."""
    return None if state.finish_reason is None else state.finish_reason["type"]


def usage(call: Call) -> dict[str, Any]:
    """Token counts of a request so far: of every answer, and of every prompt once, however many answers it has."""
    prompts = [state.prefill for state in call.states[:: call.n]]
    prompt, completion, cached = (
        sum((state.meta_info or {}).get(name, 0) for state in states)
        for name, states in (
            ("prompt_tokens", prompts),
            ("completion_tokens", call.states),
            ("cached_tokens", prompts),
        )
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
