"""The main process of a node other than node 0: no HTTP, only this node's ranks; it ends with them or with node 0."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from queue import SimpleQueue

from .managers.controller.child_watch import wait_for_death
from .managers.controller.node_link import NodeLink, join_node_0
from .managers.io_struct import NodeFailed, NodeReady
from .server_args import ServerArgs
from .support.processes import ProcessGroup, StartError

logger = logging.getLogger(__name__)

TP_RANK = f"{__package__}.managers.controller.tp_ranks:start_tp_rank"

SIGNAL_TO_ALL_S = 0.05
"""Who ends a server may signal all nodes at once: this one waits so long for its own signal."""


def run_node(server_args: ServerArgs, group: ProcessGroup) -> str:
    """Run this node's ranks, until one of them or node 0 ends; returns why. The caller ends what is left."""
    link, random_seed = join_node_0(server_args)
    # Without the seed of node 0 unseeded draws would differ between ranks.
    rank_args = replace(server_args, random_seed=random_seed, api_key=None)
    for rank in server_args.node_ranks:
        group.start(f"rank {rank}", TP_RANK, (rank_args, 0, rank, 0), "", server_args.log_level)
    ends: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_watch_ranks, args=(server_args, group, link, ends), daemon=True).start()
    threading.Thread(target=_watch_node_0, args=(link, ends), daemon=True).start()
    reason = ends.get()
    time.sleep(SIGNAL_TO_ALL_S)
    link.send(NodeFailed(reason))
    return reason


def _watch_ranks(
    server_args: ServerArgs, group: ProcessGroup, link: NodeLink, ends: SimpleQueue[str]
) -> None:
    try:
        group.wait_ready()
    except StartError as error:
        ends.put(str(error))
        return
    link.send(NodeReady())
    names = ", ".join(map(str, server_args.node_ranks))
    logger.info("node %d is ready: rank %s of %d", server_args.node_rank, names, server_args.tp_size)
    ends.put(wait_for_death(group))


def _watch_node_0(link: NodeLink, ends: SimpleQueue[str]) -> None:
    message = link.receive()
    ends.put(f"node 0: {message.reason}" if isinstance(message, NodeFailed) else "node 0 is gone")
