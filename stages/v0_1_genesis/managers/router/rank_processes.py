"""Tensor parallelism: one process per rank, all called at once, rank 0 answers.

`RankProcesses` lives in the router process as long as it. Ranks are started and watched like the server's
other children, so a dead rank ends the server (INV-LIVE).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from ...server_args import PortArgs, ServerArgs
from ...support.processes import ProcessGroup
from ...support.transport import Receiver, Sender
from ..io_struct import DetokenizerInput, EngineInput, StepInput, StepOutput
from .model_runner import choose_device

logger = logging.getLogger(__name__)

RANK_PROCESS = f"{__package__}.model_rpc:start_rank_process"


def step_endpoint(port_args: PortArgs, rank: int) -> str:
    return f"{port_args.router_endpoint}-{rank}"


def answer_endpoint(port_args: PortArgs) -> str:
    return f"{port_args.router_endpoint}-answer"


class RankProcesses:
    """The ranks of one server, seen from the router: `step` on all of them, and rank 0's answer."""

    def __init__(self, server_args: ServerArgs, port_args: PortArgs) -> None:
        choose_device(server_args, tp_rank=0)  # a missing device is known before any rank starts
        self.is_idle = True
        self._answers: Receiver[StepOutput] = Receiver(answer_endpoint(port_args), StepOutput)
        self._group = ProcessGroup()
        for rank in range(server_args.tp_size):
            self._group.start(
                f"rank {rank}",
                RANK_PROCESS,
                (server_args, port_args, rank),
                port_args.router_endpoint,
                server_args.log_level,
            )
        self._description = self._group.wait_ready()["rank 0"]
        self._ranks = [Sender(step_endpoint(port_args, rank)) for rank in range(server_args.tp_size)]
        threading.Thread(target=self._watch, daemon=True, name="rank-watch").start()

    async def step(self, recv_reqs: Sequence[EngineInput]) -> list[DetokenizerInput]:
        """One step on every rank. Their collectives keep them together; only rank 0's answer travels."""
        message = StepInput(list(recv_reqs))
        for rank in self._ranks:
            rank.send(message)
        answer = await self._answers.recv()
        self.is_idle = answer.is_idle
        return answer.output

    def describe(self) -> dict[str, Any]:
        return {key: value for key, value in self._description.items() if key != "ok"}

    def _watch(self) -> None:
        """A rank that dies leaves the others waiting in a collective: end the router, and so the server."""
        children = dict(self._group.sentinels())
        for dead in wait(list(children)):
            child = children[dead]  # type: ignore[index]
            child.process.join()  # makes the exit code known
            logger.error("%s; the server ends", child.fate)
        self._group.stop()
        os._exit(1)
