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
    return_logprob: bool = False
    logprob_start_len: int = 0
    top_logprobs_num: int = 0
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


MAX_TOP_LOGPROBS = 64
"""Most tokens that one place may list."""
MAX_LOGPROBS = 1 << 20
"""Most log probabilities that one HTTP request may ask for: some 15 MB in a message, a quarter of the longest."""

TokenLogprob = tuple[float | None, int]
"""Log probability and token id; the first token of a prompt has none, since nothing precedes it."""


class Logprobs(msgspec.Struct):
    """What a request has learned of log probabilities since its last message, or, in main, all of it.

    Of the prompt's tokens after the start position, and of the output's. Each entry of a ``top`` list has the
    best tokens at that place, best first; these lists stay empty unless they were asked for.
    ``normalized_prompt_logprob`` is the mean over the prompt's tokens, 0 where there are none.
    """

    prefill_token_logprobs: list[TokenLogprob] = []
    prefill_top_logprobs: list[list[TokenLogprob] | None] = []
    decode_token_logprobs: list[TokenLogprob] = []
    decode_top_logprobs: list[list[TokenLogprob]] = []
    normalized_prompt_logprob: float | None = None

    def add(self, new: Logprobs) -> None:
        """Append what a later message says."""
        self.prefill_token_logprobs += new.prefill_token_logprobs
        self.prefill_top_logprobs += new.prefill_top_logprobs
        self.decode_token_logprobs += new.decode_token_logprobs
        self.decode_top_logprobs += new.decode_top_logprobs
        if new.normalized_prompt_logprob is not None:
            self.normalized_prompt_logprob = new.normalized_prompt_logprob

    @property
    def num_entries(self) -> int:
        """Log probabilities in all lists together, which is what a message's size depends on."""
        tops = [*self.prefill_top_logprobs, *self.decode_top_logprobs]
        num_tokens = len(self.prefill_token_logprobs) + len(self.decode_token_logprobs)
        return num_tokens + sum(len(top) for top in tops if top is not None)


class BatchTokenIDOut(Message):
    """engine → detokenizer: what some requests produced since their last message.

    The lists run in parallel. ``output_tokens`` has each request's new tokens only, not its whole output;
    ``logprobs`` is None for a request that did not ask, ``finish_reason`` for one that goes on. ``vids`` counts how
    often a request's output was tokenized anew: tokens of another version than before continue ``decoded_texts``,
    which itself continues the whole characters of the tokens sent before.
    """

    rids: list[str]
    vids: list[int]
    decoded_texts: list[str]
    output_tokens: list[list[int]]
    stop_strs: list[list[str]]
    skip_special_tokens: list[bool]
    meta_info: list[dict[str, Any]]
    logprobs: list[Logprobs | None]
    finish_reason: list[dict[str, Any] | None]


class BatchStrOut(Message):
    """detokenizer → main: new text of some requests; whole characters only, lists in parallel."""

    rids: list[str]
    output_strs: list[str]
    meta_info: list[dict[str, Any]]
    logprobs: list[Logprobs | None]
    finish_reason: list[dict[str, Any] | None]


class NodeHello(Message):
    """another node → node 0, over TCP: which it is, and how it was started."""

    node_rank: int
    settings: dict[str, Any]


class NodeWelcome(Message):
    """node 0 → another node: all have come; sample with this seed."""

    random_seed: int


class NodeReady(Message):
    """another node → node 0: its ranks have loaded the model."""


class NodeFailed(Message):
    """between node 0 and another, either way: the sender ends, or will not have the other."""

    reason: str


EngineInput = TokenizedGenerateReqInput | AbortReq | FlushCacheReq | GetInternalStateReq
DetokenizerInput = BatchTokenIDOut | ControlOut
TokenizerManagerInput = BatchStrOut | ControlOut
ControllerMultiInput = EngineInput | DetokenizerInput
"""What a controller of replicas hears: main's requests, and what its replicas have to say."""
NodeMessage = NodeHello | NodeWelcome | NodeReady | NodeFailed
