"""The router process: one coroutine receives requests, the other steps the engine and sends its output.

Both share one thread, so a step holds up receiving; the pause after each step gives the receiver a turn.
"""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection

import msgspec

from ...server_args import PortArgs, ServerArgs
from ...support.transport import Receiver, Sender
from ..io_struct import EngineInput
from .model_rpc import ModelRpcClient

PAUSE_BETWEEN_STEPS = 0.001
"""Seconds; long enough for the receiving coroutine to take in what has arrived."""


class RouterManager:
    """Two coroutines around the model client: receive, and step."""

    def __init__(self, port_args: PortArgs, model_client: ModelRpcClient) -> None:
        self.receiver: Receiver[EngineInput] = Receiver(port_args.router_endpoint, EngineInput)
        self.sender = Sender(port_args.detokenizer_endpoint)
        self.model_client = model_client
        self.recv_reqs: list[EngineInput] = []
        self.has_work = asyncio.Event()

    async def loop_for_recv_requests(self) -> None:
        while True:
            # Await first: while this waits, the other coroutine replaces the list.
            message = await self.receiver.recv()
            self.recv_reqs.append(message)
            self.has_work.set()

    async def loop_for_forward(self) -> None:
        while True:
            if self.model_client.is_idle:
                await self.has_work.wait()
            self.has_work.clear()
            recv_reqs, self.recv_reqs = self.recv_reqs, []
            for message in await self.model_client.step(recv_reqs):
                self.sender.send(message)
            await asyncio.sleep(PAUSE_BETWEEN_STEPS)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.loop_for_recv_requests())
            tasks.create_task(self.loop_for_forward())


def start_router_process(server_args: ServerArgs, port_args: PortArgs, ready: Connection) -> None:
    """Entry of the process: load the model, say so on ``ready``, serve until killed."""

    async def serve() -> None:
        model_client = ModelRpcClient(server_args, port_args)
        manager = RouterManager(port_args, model_client)
        ready.send_bytes(msgspec.json.encode({"ok": True} | model_client.describe()))
        ready.close()
        await manager.run()

    asyncio.run(serve())
