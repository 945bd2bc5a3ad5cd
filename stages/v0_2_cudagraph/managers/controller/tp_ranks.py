"""Ranks 1 and up of tensor parallelism: each follows rank 0, which broadcasts what it has received.

`TpRanks` lives in the controller process as long as it. Every rank then does the same step, so that nothing
but requests and collectives passes between them.
"""

from __future__ import annotations

import logging
import os
import threading
from multiprocessing.connection import Connection

import msgspec

from ...layers.parallel_state import broadcast_bytes
from ...server_args import PortArgs, ServerArgs
from ...support.processes import ProcessGroup, StartError
from ..io_struct import EngineInput
from .child_watch import end_with, others_blamed
from .model_runner import choose_device
from .tp_worker import ModelTpServer

logger = logging.getLogger(__name__)

TP_RANK = f"{__name__}:start_tp_rank"

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[EngineInput])


class TpRanks:
    """The processes of this node's ranks but rank 0. Their models load while rank 0 loads its own."""

    def __init__(self, server_args: ServerArgs, port_args: PortArgs, dp_rank: int = 0) -> None:
        choose_device(server_args, tp_rank=0)  # a missing device is known before any rank starts
        self._group = ProcessGroup()
        self._are_ready = threading.Event()
        replica = f"replica {dp_rank} " if server_args.dp_size > 1 else ""
        for rank in server_args.node_ranks[1:]:
            self._group.start(
                f"{replica}rank {rank}",
                TP_RANK,
                (server_args, port_args.nccl_ports[dp_rank], rank, dp_rank),
                port_args.controller_endpoint,
                server_args.log_level,
            )
        if self._group.children:
            threading.Thread(target=self._watch, daemon=True, name="rank-watch").start()

    def wait_ready(self) -> None:
        """Wait until every rank has loaded."""
        if self._group.children:
            self._are_ready.wait()

    def _watch(self) -> None:
        """A rank that can't start or dies leaves the others in a collective: end the controller, and so the server."""
        try:
            self._group.wait_ready()
        except StartError as error:
            logger.error("%s", error)
            self._group.stop()
            os._exit(1)
        self._are_ready.set()
        end_with(self._group)


def broadcast_recv_input(recv_reqs: list[EngineInput]) -> list[EngineInput]:
    """Rank 0's ``recv_reqs``, on every rank; what the others pass is ignored."""
    data = broadcast_bytes(_encoder.encode(recv_reqs) if recv_reqs else b"")
    return _decoder.decode(data) if data else []


def start_tp_rank(
    server_args: ServerArgs, nccl_port: int, rank: int, dp_rank: int, ready: Connection
) -> None:
    """Entry of a rank process: load the model, say so on ``ready``, step whenever rank 0 does."""
    with others_blamed():
        server = ModelTpServer(server_args, rank, nccl_port, dp_rank)
        ready.send_bytes(msgspec.json.encode({"ok": True}))
        ready.close()
        while True:
            server.exposed_step(broadcast_recv_input([]))
