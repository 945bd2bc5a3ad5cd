"""What a step has to say to the detokenizer, collected while the step runs.

Owned by the ModelTpServer; emptied by every step.
"""

from __future__ import annotations

from typing import Any

from ..io_struct import MAX_LOGPROBS, BatchTokenIDOut, ControlOut, DetokenizerInput
from .infer_batch import Req


class OutputStreamer:
    """Gathers the output of finished and streaming requests into one message a step.

    Args:
        stream_interval: a stream hears of its first token at once, then of every so many.

    Attributes:
        has_stream_output: whether a stream is among those gathered; that ends a decode run.
    """

    def __init__(self, stream_interval: int) -> None:
        self.stream_interval = stream_interval
        self._due: list[Req] = []
        self._control: list[ControlOut] = []
        self.has_stream_output = False

    def add_if_due(self, req: Req) -> None:
        """Gather ``req`` if it ended, or streams and has come to its interval."""
        if req.finish_reason is not None or (
            req.stream
            and (
                len(req.output_ids) - req.num_sent_tokens >= self.stream_interval
                or not req.num_sent_tokens
                or req.unsent_text
            )
        ):
            self.add(req)

    def add(self, req: Req) -> None:
        self._due.append(req)
        self.has_stream_output |= req.stream

    def control(self, message: ControlOut) -> None:
        self._control.append(message)

    def take(self) -> list[DetokenizerInput]:
        """Everything gathered since the last call, as messages in the order of events."""
        due, self._due = self._due, []
        messages: list[DetokenizerInput] = [*self._control]
        self._control = []
        self.has_stream_output = False
        messages += [_message(reqs) for reqs in _split(due)]
        return messages


def _split(due: list[Req]) -> list[list[Req]]:
    """``due`` in order, in as few parts as keep every message's log probabilities bounded."""
    parts: list[list[Req]] = []
    room = 0
    for req in due:
        size = 0 if req.logprobs is None else req.logprobs.num_unsent
        if not parts or size > room:
            parts.append([])
            room = MAX_LOGPROBS
        parts[-1].append(req)
        room -= size
    return parts


def _message(reqs: list[Req]) -> BatchTokenIDOut:
    return BatchTokenIDOut(
        rids=[req.rid for req in reqs],
        vids=[req.vid for req in reqs],
        decoded_texts=[req.take_unsent_text() for req in reqs],
        output_tokens=[req.take_unsent_tokens() for req in reqs],
        stop_strs=[req.sampling_params.stop_strs for req in reqs],
        skip_special_tokens=[req.sampling_params.skip_special_tokens for req in reqs],
        meta_info=[_meta_info(req) for req in reqs],
        logprobs=[None if req.logprobs is None else req.logprobs.take_unsent() for req in reqs],
        finish_reason=[req.finish_reason_object() for req in reqs],
    )


def _meta_info(req: Req) -> dict[str, Any]:
    return {
        "prompt_tokens": len(req.input_ids),
        "completion_tokens": req.num_completion_tokens,
        "completion_tokens_wo_jump_forward": req.num_completion_tokens_wo_jump_forward,
        "cached_tokens": req.cached_tokens,
    }
