"""The controller process of several replicas: hands each request to one of them and passes on what they answer.

It loads no model. Every replica is a `ControllerSingle` in a process of its own, with its own ranks, pool and tree.
All that replicas say comes through here on its way to the detokenizer, which is how this process knows what is in
flight, and when to combine their answers to a control request.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from ...server_args import PortArgs, ServerArgs
from ...support.processes import ProcessGroup
from ...support.transport import Receiver, Sender
from ..io_struct import (
    AbortReq,
    BatchTokenIDOut,
    ControllerMultiInput,
    ControlOut,
    FlushCacheReq,
    GetInternalStateReq,
    TokenizedGenerateReqInput,
)
from .child_watch import end_with

logger = logging.getLogger(__name__)

REPLICA = f"{__package__}.manager_single:start_replica_process"

MOST_OF = ("new_token_ratio", "uptime_s")
"""Numbers of a replica's state that mean nothing when added up: the highest stands for all."""


@dataclass
class Replica:
    """One replica as its controller sees it."""

    sender: Sender
    in_flight: set[str] = field(default_factory=set)
    num_served: int = 0

    def note_output(self, message: BatchTokenIDOut) -> None:
        """Requests that ended, by themselves or aborted, are in flight no more."""
        outputs = zip(message.rids, message.finish_reason, strict=False)
        ended = {rid for rid, reason in outputs if reason is not None}
        self.num_served += len(self.in_flight & ended)
        self.in_flight -= ended


@dataclass
class Question:
    """A control request that every replica has been asked; ``answers`` is complete when none is None."""

    message: FlushCacheReq | GetInternalStateReq
    answers: list[dict[str, Any] | None]


class ControllerMulti:
    """Dispatches between main, the replicas and the detokenizer; waits for a message, handles it, and so on."""

    def __init__(self, server_args: ServerArgs, port_args: PortArgs) -> None:
        self.receiver: Receiver[Any] = Receiver(port_args.controller_endpoint, ControllerMultiInput)
        self.sender = Sender(port_args.detokenizer_endpoint)
        self._group = ProcessGroup()
        self.replicas = []
        for dp_rank in range(server_args.dp_size):
            replica_ports = port_args.of_replica(dp_rank)
            self._group.start(
                f"replica {dp_rank}",
                REPLICA,
                (server_args, replica_ports, dp_rank),
                replica_ports.controller_endpoint,
                server_args.log_level,
            )
            self.replicas.append(Replica(Sender(replica_ports.controller_endpoint)))
        self._choose = {"round_robin": self.round_robin, "shortest_queue": self.shortest_queue}[
            server_args.load_balance_method
        ]
        self._turn = 0
        self._seeds = random.Random(server_args.random_seed)
        self._asked: dict[str, tuple[Question, int]] = {}

    def wait_ready(self) -> dict[str, Any]:
        """Wait until every replica has loaded; what main may count on. A replica's death ends this process then."""
        answers = self._group.wait_ready().values()
        threading.Thread(target=end_with, args=(self._group,), daemon=True, name="replica-watch").start()
        return min(answers, key=lambda answer: int(answer["max_total_num_token"]))

    def loop_for_forward(self) -> None:
        while True:
            self.handle(self.receiver.wait())

    def handle(self, message: Any) -> None:
        match message:
            case TokenizedGenerateReqInput():
                self.dispatch(message)
            case AbortReq(rid=rid):
                for replica in self.replicas:
                    if rid in replica.in_flight:
                        replica.sender.send(message)
            case FlushCacheReq():
                self.flush(message)
            case GetInternalStateReq():
                self.ask(message)
            case BatchTokenIDOut():
                for replica in self.replicas:
                    replica.note_output(message)
                self.sender.send(message)
            case ControlOut():
                self.take_answer(message)

    # -- requests ----------------------------------------------------------------------------------------

    def dispatch(self, request: TokenizedGenerateReqInput) -> None:
        """Hand a request to one replica, with a seed: equal replicas would draw equal tokens for equal prompts."""
        if request.sampling_params.seed is None:
            request.sampling_params.seed = self._seeds.getrandbits(63)
        replica = self._choose()
        replica.in_flight.add(request.rid)
        replica.sender.send(request)

    def round_robin(self) -> Replica:
        replica = self.replicas[self._turn]
        self._turn = (self._turn + 1) % len(self.replicas)
        return replica

    def shortest_queue(self) -> Replica:
        """The replica with the fewest requests in flight, waiting or running; the first of several."""
        return min(self.replicas, key=lambda replica: len(replica.in_flight))

    # -- control requests --------------------------------------------------------------------------------

    def flush(self, message: FlushCacheReq) -> None:
        """Forget every replica's cache, or none: refused while one of them is busy."""
        if any(replica.in_flight for replica in self.replicas):
            self.sender.send(ControlOut(message.rid, {"success": False}))
        else:
            self.ask(message)

    def ask(self, message: FlushCacheReq | GetInternalStateReq) -> None:
        """Ask all replicas, each under a name that tells its answer from the others'."""
        question = Question(message, [None] * len(self.replicas))
        for number, replica in enumerate(self.replicas):
            rid = f"{message.rid}-{number}"
            self._asked[rid] = question, number
            replica.sender.send(msgspec.structs.replace(message, rid=rid))

    def take_answer(self, message: ControlOut) -> None:
        """Note one replica's answer; the last one completes the answer of all."""
        if message.rid not in self._asked:
            logger.warning("dropped an answer to no question")
            return
        question, number = self._asked.pop(message.rid)
        question.answers[number] = message.payload
        answers = [answer for answer in question.answers if answer is not None]
        if len(answers) < len(self.replicas):
            return
        if isinstance(question.message, FlushCacheReq):
            payload: dict[str, Any] = {"success": all(answer["success"] for answer in answers)}
        else:
            payload = self.combine_states(answers)
        self.sender.send(ControlOut(question.message.rid, payload))

    def combine_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The replicas' numbers added up, and under ``replicas`` those of each, with its requests counted."""
        combined = {
            name: (max if name in MOST_OF else sum)(state[name] for state in states) for name in states[0]
        }
        counts = [
            {"requests_served": replica.num_served, "requests_in_flight": len(replica.in_flight)}
            for replica in self.replicas
        ]
        replicas = [state | count for state, count in zip(states, counts, strict=True)]
        return combined | {"replicas": replicas}


def start_controller_process(server_args: ServerArgs, port_args: PortArgs, ready: Connection) -> None:
    """Entry of the process: start the replicas, say on ``ready`` that they are, serve until killed."""
    controller = ControllerMulti(server_args, port_args)
    ready.send_bytes(msgspec.json.encode({"ok": True} | controller.wait_ready()))
    ready.close()
    controller.loop_for_forward()
