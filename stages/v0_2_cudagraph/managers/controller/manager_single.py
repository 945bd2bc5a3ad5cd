"""The controller process: receives requests, shares them with the other ranks, steps rank 0, sends its output.

One thread and no event loop: what has arrived is taken in between two steps.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

import msgspec

from ...server_args import PortArgs, ServerArgs
from ...support.transport import Receiver, Sender
from ..io_struct import EngineInput
from .tp_ranks import TpRanks, broadcast_recv_input
from .tp_worker import ModelTpServer

IDLE_BROADCAST_S = 60.0
"""An idle server still steps this often: collectives of ranks that hear nothing for long time out."""


class ControllerSingle:
    """Rank 0 and its two sockets."""

    def __init__(self, server_args: ServerArgs, port_args: PortArgs) -> None:
        self.ranks = TpRanks(server_args, port_args)
        self.tp_server = ModelTpServer(server_args, 0, port_args.nccl_port)
        self.ranks.wait_ready()
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
    controller = ControllerSingle(server_args, port_args)
    ready.send_bytes(msgspec.json.encode({"ok": True} | controller.tp_server.describe()))
    ready.close()
    controller.loop_for_forward()
