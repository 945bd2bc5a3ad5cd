"""Ranks 1 and up of tensor parallelism: each follows rank 0, which broadcasts what it has received.

`TpRanks` lives in the controller process as long as it. Every rank then does the same step, so that nothing
but requests and collectives passes between them.
"""

from __future__ import annotations

import logging
import os
import threading
from multiprocessing.connection import Connection, wait

import msgspec

from ...layers.parallel_state import broadcast_bytes
from ...server_args import PortArgs, ServerArgs
from ...support.processes import ProcessGroup
from ..io_struct import EngineInput
from .model_runner import choose_device
from .tp_worker import ModelTpServer

logger = logging.getLogger(__name__)

TP_RANK = f"{__name__}:start_tp_rank"

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[EngineInput])


class TpRanks:
    """The processes of ranks 1 and up. Their models load while rank 0 loads its own."""

    def __init__(self, server_args: ServerArgs, port_args: PortArgs) -> None:
        choose_device(server_args, tp_rank=0)  # a missing device is known before any rank starts
        self._group = ProcessGroup()
        for rank in range(1, server_args.tp_size):
            self._group.start(
                f"rank {rank}",
                TP_RANK,
                (server_args, port_args, rank),
                port_args.controller_endpoint,
                server_args.log_level,
            )
        if self._group.children:
            threading.Thread(target=self._watch, daemon=True, name="rank-watch").start()

    def wait_ready(self) -> None:
        """Wait until every rank has loaded; raises `StartError`."""
        self._group.wait_ready()

    def _watch(self) -> None:
        """A rank that dies leaves the others waiting in a collective: end the controller, and so the server."""
        children = dict(self._group.sentinels())
        for dead in wait(list(children)):
            child = children[dead]  # type: ignore[index]
            child.process.join()  # makes the exit code known
            logger.error("%s; the server ends", child.fate)
        self._group.stop()
        os._exit(1)


def broadcast_recv_input(recv_reqs: list[EngineInput]) -> list[EngineInput]:
    """Rank 0's ``recv_reqs``, on every rank; what the others pass is ignored."""
    return _decoder.decode(broadcast_bytes(_encoder.encode(recv_reqs)))


def start_tp_rank(server_args: ServerArgs, port_args: PortArgs, rank: int, ready: Connection) -> None:
    """Entry of a rank process: load the model, say so on ``ready``, step whenever rank 0 does."""
    server = ModelTpServer(server_args, rank, port_args.nccl_port)
    ready.send_bytes(msgspec.json.encode({"ok": True}))
    ready.close()
    while True:
        server.exposed_step(broadcast_recv_input([]))
