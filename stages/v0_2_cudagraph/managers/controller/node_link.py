"""How the nodes of one server find each other, agree, and end together: a TCP connection from each to node 0.

Node 0's end belongs to its controller, the other to the other node's main; it is open as long as both live. A few
lines of JSON pass at the start, and then nothing: the connection's end is the news. The ranks' own traffic is
torch.distributed's, which trusts its network as much as this does.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from ...network import listen
from ...server_args import ServerArgs
from ...support.processes import StartError
from ..io_struct import NodeFailed, NodeHello, NodeMessage, NodeReady, NodeWelcome

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
RETRY_S = 0.2
PROGRESS_INTERVAL_S = 5.0
MAX_LINE_BYTES = 1 << 16

KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A killed process closes its connections at once; a machine that vanishes is missed after 20 s."""

LOCAL_FIELDS = frozenset(
    {
        *("model_path", "tokenizer_path", "chat_template", "host", "port", "api_key"),
        *("allow_remote_without_key", "log_level", "disable_log_stats"),
        *("node_rank", "nccl_init_addr", "dist_timeout", "random_seed"),
    }
)
"""What may differ between nodes; all ranks must do the same steps, so nothing else may."""


class NodeLink:
    """One end of the connection; ``name`` is who is at the other."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.name = name
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE.items():
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._connection = connection
        self._lines = connection.makefile("rb")

    def send(self, message: NodeMessage) -> None:
        with contextlib.suppress(OSError):  # who is gone will be missed by `receive`
            self._connection.sendall(msgspec.json.encode(message) + b"\n")

    def receive(self, timeout_s: float | None = None) -> NodeMessage | None:
        """The next message; None where there is none any more. After a ``TimeoutError`` only `close` is left."""
        self._connection.settimeout(timeout_s)
        try:
            line = self._lines.readline(MAX_LINE_BYTES)
            return _decoder.decode(line) if line.endswith(b"\n") else None
        except TimeoutError:
            raise
        except (OSError, msgspec.DecodeError, UnicodeError):
            return None

    def close(self) -> None:
        self._lines.close()
        self._connection.close()


_decoder = msgspec.json.Decoder(NodeMessage)


class OtherNodes:
    """Node 0's links. Once this is constructed all nodes have come, and one that ends ends this process."""

    def __init__(self, server_args: ServerArgs) -> None:
        self._links = gather_nodes(server_args) if server_args.nnodes > 1 else {}
        self._num_ready = threading.Semaphore(0)
        for link in self._links.values():
            threading.Thread(target=self._watch, args=(link,), daemon=True, name=link.name).start()
            link.send(NodeWelcome(server_args.random_seed))

    def wait_ready(self) -> None:
        """Wait until every node's ranks have loaded."""
        for _ in self._links:
            self._num_ready.acquire()

    def _watch(self, link: NodeLink) -> None:
        while isinstance(message := link.receive(), NodeReady):
            self._num_ready.release()
        reason = message.reason if isinstance(message, NodeFailed) else "it is gone"
        logger.error("%s: %s; the server ends", link.name, reason)
        os._exit(1)


def gather_nodes(server_args: ServerArgs) -> dict[int, NodeLink]:
    """Wait at ``--nccl-init-addr`` until every other node has come; raises `StartError` after ``--dist-timeout``."""
    assert server_args.node_address is not None
    try:
        listener = listen(server_args.node_address)
    except OSError as error:
        raise StartError(
            f"--nccl-init-addr {server_args.nccl_init_addr} can't be listened at: {error.strerror}. "
            "It must be a free port at an address of node 0."
        ) from error
    links: dict[int, NodeLink] = {}
    deadline = time.monotonic() + server_args.dist_timeout
    with listener:
        while missing := [f"node {rank}" for rank in range(1, server_args.nnodes) if rank not in links]:
            names = " and ".join(missing)
            logger.info("waiting for %s at %s", names, server_args.nccl_init_addr)
            listener.settimeout(max(0.01, min(PROGRESS_INTERVAL_S, deadline - time.monotonic())))
            try:
                _admit(NodeLink(listener.accept()[0], "a stranger"), server_args, links)
            except TimeoutError:
                if time.monotonic() < deadline:
                    continue
                reason = (
                    f"{names} did not come to {server_args.nccl_init_addr} within {server_args.dist_timeout} s. "
                    "Start this command on every node, or raise --dist-timeout."
                )
                for link in links.values():
                    link.send(NodeFailed(reason))
                raise StartError(reason) from None
    return links


def _admit(link: NodeLink, server_args: ServerArgs, links: dict[int, NodeLink]) -> None:
    """Take the caller in as a node if it is one, and was started as this one was."""
    try:
        hello = link.receive(HELLO_TIMEOUT_S)
    except TimeoutError:
        hello = None
    if not isinstance(hello, NodeHello):
        logger.warning("somebody called who is no node of a server")
        link.close()
        return
    link.name = f"node {hello.node_rank}"
    if (problem := _disagreement(hello, server_args)) is not None:
        logger.warning("refused %s: %s", link.name, problem)
        link.send(NodeFailed(problem))
        link.close()
        return
    if (earlier := links.get(hello.node_rank)) is not None:  # most likely it has been started anew
        earlier.send(NodeFailed(f"another {link.name} has come"))
        earlier.close()
    links[hello.node_rank] = link


def _disagreement(hello: NodeHello, server_args: ServerArgs) -> str | None:
    """Why a node can't join, in words for its user; None if it can."""
    if not 0 < hello.node_rank < server_args.nnodes:
        return f"--node-rank {hello.node_rank} is none of the {server_args.nnodes} nodes"
    ours = shared_settings(server_args)
    for name in ours.keys() | hello.settings.keys():
        if (here := ours.get(name)) != (there := hello.settings.get(name)):
            label = name if "." in name else "--" + name.replace("_", "-")
            return f"{label} is {there} on node {hello.node_rank} and {here} on node 0"
    return None


def shared_settings(server_args: ServerArgs) -> Mapping[str, Any]:
    """What all nodes must have equal: flags, and the files that say what model it is."""
    flags = {name: value for name, value in asdict(server_args).items() if name not in LOCAL_FIELDS}
    files = (
        Path(server_args.model_path, "config.json"),
        Path(server_args.tokenizer_path, "tokenizer.json"),
    )
    return flags | {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files}


def join_node_0(server_args: ServerArgs) -> tuple[NodeLink, int]:
    """Wait until all nodes have met at ``--nccl-init-addr``; the link to node 0, and the seed for all.

    Raises `StartError` after ``--dist-timeout``, or if node 0 will not have this node.
    """
    assert server_args.node_rank is not None
    deadline = time.monotonic() + server_args.dist_timeout
    # Made before the call: node 0 does not wait long for a caller's first word, and files may be slow.
    hello = NodeHello(server_args.node_rank, dict(shared_settings(server_args)))
    link = NodeLink(_call_node_0(server_args, deadline), "node 0")
    link.send(hello)
    try:
        answer = link.receive(max(0.01, deadline - time.monotonic()))
    except TimeoutError:
        answer = NodeFailed(f"not all nodes have come within {server_args.dist_timeout} s")
    if isinstance(answer, NodeWelcome):
        return link, answer.random_seed
    link.close()
    reason = answer.reason if isinstance(answer, NodeFailed) else "it has hung up"
    raise StartError(f"node 0 at {server_args.nccl_init_addr}: {reason}")


def _call_node_0(server_args: ServerArgs, deadline: float) -> socket.socket:
    """A connection to node 0, which may be started later than this node."""
    assert server_args.node_address is not None
    next_progress = time.monotonic()
    while True:
        try:
            connection = socket.create_connection(server_args.node_address, timeout=PROGRESS_INTERVAL_S)
            if connection.getsockname() != connection.getpeername():
                return connection
            connection.close()  # on one machine a caller may be given the port that it calls, and reach itself
        except OSError as error:
            if time.monotonic() >= deadline:
                raise StartError(
                    f"node 0 did not answer at {server_args.nccl_init_addr} within {server_args.dist_timeout} s "
                    f"({error}). Start it with --node-rank 0, or raise --dist-timeout."
                ) from error
        if time.monotonic() >= next_progress:
            logger.info("waiting for node 0 at %s", server_args.nccl_init_addr)
            next_progress += PROGRESS_INTERVAL_S
        time.sleep(RETRY_S)
