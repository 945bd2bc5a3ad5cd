"""What a step has to say to the detokenizer, collected while the step runs.

Owned by the ModelTpServer; emptied by every step.
"""

from __future__ import annotations

from typing import Any

from ..io_struct import BatchTokenIDOut, ControlOut, DetokenizerInput
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
        if due:
            messages.append(
                BatchTokenIDOut(
                    rids=[req.rid for req in due],
                    vids=[req.vid for req in due],
                    decoded_texts=[req.take_unsent_text() for req in due],
                    output_tokens=[req.take_unsent_tokens() for req in due],
                    stop_strs=[req.sampling_params.stop_strs for req in due],
                    skip_special_tokens=[req.sampling_params.skip_special_tokens for req in due],
                    meta_info=[_meta_info(req) for req in due],
                    finish_reason=[req.finish_reason_object() for req in due],
                )
            )
        return messages


def _meta_info(req: Req) -> dict[str, Any]:
    info: dict[str, Any] = {
        "prompt_tokens": len(req.input_ids),
        "completion_tokens": req.num_completion_tokens,
        "completion_tokens_wo_jump_forward": req.num_completion_tokens_wo_jump_forward,
        "cached_tokens": req.cached_tokens,
    }
    if req.return_normalized_logprob:
        info["normalized_prompt_logprob"] = req.normalized_prompt_logprob
    return info
