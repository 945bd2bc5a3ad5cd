"""The detokenizer process: token ids in, text that may be shown out.

Its state is one decoder per live request, dropped with the request's last output. Answers to control requests
pass through unchanged, so that they stay in order with the texts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from ..hf_transformers_utils import Tokenizer, get_tokenizer
from ..server_args import PortArgs, ServerArgs
from ..support.text_stream import IncrementalDetokenizer, StopStringFilter
from ..support.transport import Receiver, Sender
from .io_struct import BatchStrOut, BatchTokenIDOut, ControlOut, DetokenizerInput

logger = logging.getLogger(__name__)

MAX_LIVE_REQUESTS = 1 << 16
"""Bound on the decoders kept, should an engine ever forget to end its requests."""


@dataclass(slots=True)
class DecodeStatus:
    """What one request's text so far leaves open: bytes of a character, the beginning of a stop string."""

    detokenizer: IncrementalDetokenizer
    stop_filter: StopStringFilter
    vid: int = 0

    def begin_version(self, vid: int, decoded_text: str, detokenizer: IncrementalDetokenizer) -> str:
        """The tokens to come are of another version, and continue ``decoded_text``, which has also the character
        that the old ones left unfinished; return what of it may be shown."""
        self.vid, self.detokenizer = vid, detokenizer
        return self.stop_filter.push(decoded_text)

    def push(self, token_ids: list[int], is_last: bool) -> str:
        """New text that may be shown; after the last tokens nothing stays behind."""
        text = self.stop_filter.push(self.detokenizer.push(token_ids))
        if is_last:
            text += self.stop_filter.push(self.detokenizer.flush()) + self.stop_filter.flush()
        return text


class DetokenizerManager:
    """Decodes what the engine sends and passes it on to main."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decode_status: dict[str, DecodeStatus] = {}

    def handle_loop(self, receiver: Receiver[DetokenizerInput], sender: Sender) -> None:
        """Serve until the process is killed; one thing at a time needs no event loop."""
        while True:
            answer = self.handle(receiver.wait())
            if answer is not None:
                sender.send(answer)

    def handle(self, message: DetokenizerInput) -> BatchStrOut | ControlOut | None:
        """One message's answer; None if there is nothing to show yet."""
        if isinstance(message, ControlOut):
            return message
        if len({len(parallel) for parallel in msgspec.structs.astuple(message)}) != 1:
            logger.warning("dropped a batch whose lists have different lengths")
            return None
        return self._decode(message)

    def _decode(self, batch: BatchTokenIDOut) -> BatchStrOut | None:
        out = BatchStrOut([], [], [], [], [])
        parallel = (batch.rids, batch.output_tokens, batch.meta_info, batch.logprobs, batch.finish_reason)
        settings = (batch.stop_strs, batch.skip_special_tokens)
        versions = zip(batch.vids, batch.decoded_texts, strict=True)
        for rid, tokens, meta_info, logprobs, reason, stops, skip, version in zip(
            *parallel, *settings, versions, strict=True
        ):
            text = self._decode_one(rid, tokens, reason, stops, skip, *version)
            if text or logprobs is not None or reason is not None:
                out.rids.append(rid)
                out.output_strs.append(text)
                out.meta_info.append(meta_info)
                out.logprobs.append(logprobs)
                out.finish_reason.append(reason)
        return out if out.rids else None

    def _decode_one(
        self,
        rid: str,
        tokens: list[int],
        reason: dict[str, Any] | None,
        stops: list[str],
        skip: bool,
        vid: int,
        decoded_text: str,
    ) -> str:
        status = self.decode_status.get(rid)
        if status is None:
            status = self._new_status(stops, skip)
            if reason is None:
                self._remember(rid, status)
        elif reason is not None:
            del self.decode_status[rid]
        text = ""
        if status.vid != vid:
            detokenizer = IncrementalDetokenizer(self._tokenizer, skip)
            text = status.begin_version(vid, decoded_text, detokenizer)
        return text + status.push(tokens, is_last=reason is not None)

    def _new_status(self, stops: list[str], skip: bool) -> DecodeStatus:
        return DecodeStatus(IncrementalDetokenizer(self._tokenizer, skip), StopStringFilter(stops))

    def _remember(self, rid: str, status: DecodeStatus) -> None:
        if len(self.decode_status) >= MAX_LIVE_REQUESTS:
            oldest = next(iter(self.decode_status))
            logger.warning("over %d live requests: forgot the oldest, %s", MAX_LIVE_REQUESTS, oldest)
            del self.decode_status[oldest]
        self.decode_status[rid] = status


def start_detokenizer_process(server_args: ServerArgs, port_args: PortArgs, ready: Connection) -> None:
    """Entry of the process: connect, say so on ``ready``, serve until killed."""
    manager = DetokenizerManager(get_tokenizer(server_args.tokenizer_path, server_args.model_path))
    receiver: Receiver[DetokenizerInput] = Receiver(port_args.detokenizer_endpoint, DetokenizerInput)
    sender = Sender(port_args.tokenizer_endpoint)
    ready.send_bytes(msgspec.json.encode({"ok": True}))
    ready.close()
    manager.handle_loop(receiver, sender)
