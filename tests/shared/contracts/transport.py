"""Contract of the sockets between processes: typed messages arrive in order, anything else is dropped."""

from __future__ import annotations

import asyncio
import os
import pickle
import stat
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest
import zmq


class Ring(Protocol):
    """What the contract needs of a stage's transport."""

    messages: dict[str, list[Any]]
    """By name of a union of messages: one example or more of each member."""

    def new_folder(self) -> Path: ...
    def sender(self, endpoint: str) -> Any: ...
    def receiver(self, endpoint: str, union: str) -> Any: ...


class TransportContract:
    """Subclass with ``make_ring``."""

    @staticmethod
    def make_ring() -> Ring:
        raise NotImplementedError

    @pytest.fixture
    def ring(self) -> Ring:
        return self.make_ring()

    def test_the_folder_is_private_and_short(self, ring: Ring) -> None:
        folder = ring.new_folder()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(str(folder)) < 70, "a socket's path must stay under 100 bytes"
        folder.rmdir()

    def test_every_message_arrives_as_it_was_sent(self, ring: Ring) -> None:
        async def exchange(endpoint: str, union: str, messages: list[Any]) -> list[Any]:
            receiver, sender = ring.receiver(endpoint, union), ring.sender(endpoint)
            for message in messages:
                sender.send(message)
            received = [await asyncio.wait_for(receiver.recv(), 10) for _ in messages]
            receiver.close()
            sender.close()
            return received

        folder = ring.new_folder()
        for union, messages in ring.messages.items():
            many = messages * 200
            assert asyncio.run(exchange(f"ipc://{folder / union}", union, many)) == many

    def test_bad_frames_are_dropped(self, ring: Ring) -> None:
        """Pickle, truncated, empty, several frames, deep, of another union: the next good one arrives."""

        async def exchange(endpoint: str, union: str, good: Any, strangers: list[Any]) -> Any:
            receiver = ring.receiver(endpoint, union)
            with zmq.Context() as context, context.socket(zmq.PUSH) as raw:
                raw.linger = 5000
                raw.connect(endpoint)
                whole = msgspec.msgpack.encode(good)
                for frames in (
                    *([pickle.dumps(good.__class__)], [whole[:-1]], [whole + b"\x00"], [b""], [b"", b""]),
                    *([whole, whole], [b"\x91" * 100_000], [b"\xdd\xff\xff\xff\xff"], [os.urandom(999)]),
                    *([msgspec.json.encode(good)], [b"\xc1"]),
                    *([msgspec.msgpack.encode(message)] for message in strangers),
                    [whole],  # the same connection: it arrives after all of those
                ):
                    raw.send_multipart(frames)
                received = await asyncio.wait_for(receiver.recv(), 10)
            receiver.close()
            return received

        folder = ring.new_folder()
        for union, messages in ring.messages.items():
            strangers = [
                message
                for other, theirs in ring.messages.items()
                for message in theirs
                if type(message) not in {type(mine) for mine in messages} and other != union
            ]
            received = asyncio.run(exchange(f"ipc://{folder / union}", union, messages[0], strangers))
            assert received == messages[0]

    def test_sending_never_waits(self, ring: Ring) -> None:
        """Nobody is bound yet, or any more: `send` returns all the same."""
        folder = ring.new_folder()
        union, messages = next(iter(ring.messages.items()))
        sender = ring.sender(f"ipc://{folder / union}")
        for _ in range(5000):
            sender.send(messages[0])
        sender.close()
