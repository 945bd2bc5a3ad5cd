"""Every message that crosses a process border, and nothing else does.

The unions are closed: a frame that decodes to none of their members is dropped
(`support/transport.py`). Messages live as long as one hop.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..constrained.regex_index import RegexIndex
from ..sampling_params import SamplingParams


class Message(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Base of everything on a socket; the class name travels as the tag."""


class TokenizedGenerateReqInput(Message):
    """main → engine: one prompt, ready to be scheduled; ``regex_index`` is its regex, compiled."""

    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    stream: bool
    return_normalized_logprob: bool = False
    normalized_logprob_start_len: int = 0
    regex_index: RegexIndex | None = None


class AbortReq(Message):
    """main → engine: nobody waits for this request any more."""

    rid: str


class FlushCacheReq(Message):
    """main → engine: forget every cached prefix; refused while requests are waiting or running."""

    rid: str


class GetInternalStateReq(Message):
    """main → engine: describe the engine's state now."""

    rid: str


class ControlOut(Message):
    """engine → detokenizer → main: the answer to a control request, passed round the whole ring."""

    rid: str
    payload: dict[str, Any]


class BatchTokenIDOut(Message):
    """engine → detokenizer: what some requests produced since their last message.

    The lists run in parallel. ``output_tokens`` has each request's new tokens only, not its whole output;
    ``finish_reason`` is None for a request that goes on. ``vids`` counts how often a request's output was
    tokenized anew: tokens of another version than before continue ``decoded_texts``, which itself continues the
    whole characters of the tokens sent before.
    """

    rids: list[str]
    vids: list[int]
    decoded_texts: list[str]
    output_tokens: list[list[int]]
    stop_strs: list[list[str]]
    skip_special_tokens: list[bool]
    meta_info: list[dict[str, Any]]
    finish_reason: list[dict[str, Any] | None]


class BatchStrOut(Message):
    """detokenizer → main: new text of some requests; whole characters only, lists in parallel."""

    rids: list[str]
    output_strs: list[str]
    meta_info: list[dict[str, Any]]
    finish_reason: list[dict[str, Any] | None]


EngineInput = TokenizedGenerateReqInput | AbortReq | FlushCacheReq | GetInternalStateReq
DetokenizerInput = BatchTokenIDOut | ControlOut
TokenizerManagerInput = BatchStrOut | ControlOut
