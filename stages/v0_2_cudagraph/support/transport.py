"""Typed messages over private ZMQ sockets; used by every process of a server.

A socket lives as long as its process. Frames are msgpack-encoded `msgspec` structs of a closed union:
whatever does not decode to one is logged and dropped, so that nothing a stranger writes can stop or steer
a process.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
"""Longest frame a receiver accepts; ZMQ itself hangs up on a peer that sends more."""

MAX_SOCKET_PATH = 100
"""Bytes of an ipc path; the kernel's own limit for Unix sockets is a little over this."""

IPC = "ipc://"

MessageT = TypeVar("MessageT")


def new_socket_dir() -> Path:
    """Create a folder, for its owner only (0700), whose path is short enough for ipc endpoints."""
    parent = "/tmp" if Path("/tmp").is_dir() else tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="strata-", dir=parent))


def ipc_endpoint(socket_dir: Path, name: str) -> str:
    """Endpoint of the socket ``name`` in ``socket_dir``; raises ``ValueError`` if the path is too long."""
    path = str(socket_dir / name)
    if len(path.encode()) > MAX_SOCKET_PATH:
        raise ValueError(
            f"The socket path {path} is longer than {MAX_SOCKET_PATH} bytes; set TMPDIR shorter."
        )
    return IPC + path


def remove_socket_dir(endpoint: str) -> None:
    """Remove the folder that holds ``endpoint``, if it is still there; any process may call it."""
    if endpoint.startswith(IPC):
        shutil.rmtree(Path(endpoint.removeprefix(IPC)).parent, ignore_errors=True)


class Receiver(Generic[MessageT]):
    """The bound end of a one-way channel: yields messages of ``message_type`` (a union of structs)."""

    def __init__(self, endpoint: str, message_type: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        # The same socket without asyncio, for `wait` and `drain`.
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)

    async def recv(self) -> MessageT:
        """Wait for the next message; bad frames are skipped and never raise."""
        while True:
            message = self._decode(await self._socket.recv_multipart())
            if message is not None:
                return message

    def wait(self) -> MessageT:
        """As `recv`, for a process without an event loop: blocks its thread, at a third of the cost."""
        while True:
            message = self._decode(self._plain.recv_multipart())
            if message is not None:
                return message

    def poll(self, timeout_s: float) -> bool:
        """Whether a message has arrived, after waiting at most ``timeout_s`` for one."""
        return bool(self._plain.poll(int(timeout_s * 1000)))

    def drain(self) -> list[MessageT]:
        """Every message that has already arrived, without waiting."""
        messages: list[MessageT] = []
        while True:
            try:
                message = self._decode(self._plain.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return messages
            if message is not None:
                messages.append(message)

    def close(self) -> None:
        self._socket.close()

    def _decode(self, frames: list[bytes]) -> MessageT | None:
        if len(frames) != 1:
            logger.warning("dropped a message of %d frames; every message here has one", len(frames))
            return None
        try:
            return self._decoder.decode(frames[0])
        except (msgspec.DecodeError, RecursionError, UnicodeError, ValueError, OverflowError) as error:
            # The frame itself is not logged: it may hold prompts, or terminal escapes of a stranger.
            logger.warning("dropped a bad frame of %d bytes (%s)", len(frames[0]), type(error).__name__)
            return None


class Sender:
    """The connecting end of a one-way channel; may be created before the other end is bound."""

    def __init__(self, endpoint: str) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        # No high-water mark: a slow or dead receiver must never block the sender. Its death ends the
        # server within seconds (INV-LIVE), which bounds what can pile up here.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def send(self, message: msgspec.Struct) -> None:
        """Queue ``message`` and return at once."""
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()
