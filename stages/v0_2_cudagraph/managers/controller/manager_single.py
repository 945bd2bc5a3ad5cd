"""The controller process: receives requests, shares them with the other ranks, steps rank 0, sends its output.

One thread and no event loop: what has arrived is taken in between two steps. With data parallelism every replica
has such a process (`manager_multi.py`).
"""

from __future__ import annotations

from multiprocessing.connection import Connection

import msgspec

from ...server_args import PortArgs, ServerArgs
from ...support.transport import Receiver, Sender
from ..io_struct import EngineInput
from .child_watch import others_blamed
from .node_link import OtherNodes
from .tp_ranks import TpRanks, broadcast_recv_input
from .tp_worker import ModelTpServer

IDLE_BROADCAST_S = 60.0
"""An idle server still steps this often: collectives of ranks that hear nothing for long time out."""


class ControllerSingle:
    """Rank 0 and its two sockets."""

    def __init__(self, server_args: ServerArgs, port_args: PortArgs, dp_rank: int = 0) -> None:
        self.nodes = OtherNodes(server_args)
        self.ranks = TpRanks(server_args, port_args, dp_rank)
        self.tp_server = ModelTpServer(server_args, 0, port_args.nccl_ports[dp_rank], dp_rank)
        self.ranks.wait_ready()
        self.nodes.wait_ready()
        self.has_ranks = server_args.tp_size > 1
        self.receiver: Receiver[EngineInput] = Receiver(port_args.controller_endpoint, EngineInput)
        self.sender = Sender(port_args.detokenizer_endpoint)

    def loop_for_forward(self) -> None:
        """Step for ever; with nothing to do, once more for the idle checks, then wait for a message."""
        was_idle = False
        while True:
            if was_idle:
                self.receiver.poll(IDLE_BROADCAST_S)
            recv_reqs = self.receiver.drain()
            was_idle = self.tp_server.is_idle and not recv_reqs
            if self.has_ranks:
                recv_reqs = broadcast_recv_input(recv_reqs)
            for message in self.tp_server.exposed_step(recv_reqs):
                self.sender.send(message)


def start_controller_process(server_args: ServerArgs, port_args: PortArgs, ready: Connection) -> None:
    """Entry of the process: load the model, say so on ``ready``, serve until killed."""
    start_replica_process(server_args, port_args, 0, ready)


def start_replica_process(
    server_args: ServerArgs, port_args: PortArgs, dp_rank: int, ready: Connection
) -> None:
    """The same as one of several replicas."""
    with others_blamed():
        controller = ControllerSingle(server_args, port_args, dp_rank)
        ready.send_bytes(msgspec.json.encode({"ok": True} | controller.tp_server.describe()))
        ready.close()
        controller.loop_for_forward()
