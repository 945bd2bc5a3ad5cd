"""A router without a model: echoes each prompt's tokens, over and over, through the real sockets.

Lets the whole front be tested, and its own cost measured, before and without any engine.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from stages.v0_1_genesis.hf_transformers_utils import Tokenizer, get_tokenizer
from stages.v0_1_genesis.managers.io_struct import (
    AbortReq,
    BatchTokenIDOut,
    ControlOut,
    EngineInput,
    FlushCacheReq,
    GetInternalStateReq,
    TokenizedGenerateReqInput,
)
from stages.v0_1_genesis.server_args import PortArgs, ServerArgs
from stages.v0_1_genesis.support.text_stream import IncrementalDetokenizer, StopStringFilter
from stages.v0_1_genesis.support.transport import Receiver, Sender

POOL, CONTEXT, VOCABULARY = 400, 256, 512
STEP_S = float(os.environ.get("FAKE_ROUTER_STEP_S", "0.002"))


@dataclass
class Echo:
    """One request: how many tokens it has had, and whether a stop string has come."""

    req: TokenizedGenerateReqInput
    detokenizer: IncrementalDetokenizer
    stop_filter: StopStringFilter
    count: int = 0
    unsent: list[int] = field(default_factory=list)

    def step(self) -> dict[str, Any] | None:
        """Add a token; why the request ended, or None."""
        ids, params = self.req.input_ids, self.req.sampling_params
        if self.count >= params.max_new_tokens:
            return {"type": "length", "length": self.count}
        token = ids[self.count % len(ids)]
        self.count += 1
        self.unsent.append(token)
        self.stop_filter.push(self.detokenizer.push([token]))
        if self.stop_filter.matched is not None:
            return {"type": "stop", "matched": self.stop_filter.matched}
        if self.count >= params.max_new_tokens:
            return {"type": "length", "length": self.count}
        return None


class FakeRouter:
    """Steps all requests together, as an engine would."""

    def __init__(self, tokenizer: Tokenizer, port_args: PortArgs) -> None:
        self.tokenizer = tokenizer
        self.receiver: Receiver[EngineInput] = Receiver(port_args.router_endpoint, EngineInput)
        self.sender = Sender(port_args.detokenizer_endpoint)
        self.running: dict[str, Echo] = {}
        self.seen = self.aborted = 0

    async def receive(self) -> None:
        while True:
            self.handle(await self.receiver.recv())

    def handle(self, message: EngineInput) -> None:
        match message:
            case TokenizedGenerateReqInput():
                self.seen += 1
                params = message.sampling_params
                self.running[message.rid] = Echo(
                    message,
                    IncrementalDetokenizer(self.tokenizer, params.skip_special_tokens),
                    StopStringFilter(params.stop_strs),
                )
            case AbortReq(rid=rid):
                if echo := self.running.pop(rid, None):
                    self.aborted += 1
                    self.send([(echo, {"type": "abort", "message": "the request was aborted"})])
            case FlushCacheReq(rid=rid):
                self.sender.send(ControlOut(rid, {"success": not self.running}))
            case GetInternalStateReq(rid=rid):
                state = {"running": len(self.running), "seen": self.seen, "aborted": self.aborted}
                self.sender.send(ControlOut(rid, state))

    async def step_forever(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            due = []
            for rid, echo in list(self.running.items()):
                reason = echo.step()
                if reason is not None:
                    del self.running[rid]
                if reason is not None or echo.req.stream:
                    due.append((echo, reason))
            if due:
                self.send(due)

    def send(self, due: list[tuple[Echo, dict[str, Any] | None]]) -> None:
        out = BatchTokenIDOut([], [], [], [], [], [])
        for echo, reason in due:
            out.rids.append(echo.req.rid)
            out.output_tokens.append(echo.unsent)
            echo.unsent = []
            out.stop_strs.append(echo.req.sampling_params.stop_strs)
            out.skip_special_tokens.append(echo.req.sampling_params.skip_special_tokens)
            counts = {"prompt_tokens": len(echo.req.input_ids), "completion_tokens": echo.count}
            out.meta_info.append(counts | {"cached_tokens": 0})
            out.finish_reason.append(reason)
        self.sender.send(out)


def start(server_args: ServerArgs, port_args: PortArgs, ready: Connection) -> None:
    """Entry point with the signature of the real router's."""
    behaviour = os.environ.get("FAKE_ROUTER", "")
    if behaviour == "refuse":
        raise ValueError("--max-total-tokens 1 is too small for this model.")
    if behaviour == "crash":
        raise TypeError("a bug while loading")
    if behaviour == "die":
        os._exit(7)
    if behaviour == "slow":
        time.sleep(2)
    router = FakeRouter(get_tokenizer(server_args.tokenizer_path), port_args)
    sizes = {
        "max_total_num_token": POOL,
        "max_req_input_len": CONTEXT - 1,
        "context_len": CONTEXT,
        "vocab_size": VOCABULARY,
        "device": "none",
        "dtype": "none",
    }
    ready.send_bytes(msgspec.json.encode({"ok": True} | sizes))

    async def serve() -> None:
        await asyncio.gather(router.receive(), router.step_forever())

    asyncio.run(serve())
