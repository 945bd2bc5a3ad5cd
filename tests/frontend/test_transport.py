"""The transport carries every message unchanged and drops, without harm, whatever is no message."""

from __future__ import annotations

import asyncio
import pickle
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from stages.v0_1_genesis.managers.io_struct import (
    AbortReq,
    BatchTokenIDOut,
    ControlOut,
    DetokenizerInput,
    EngineInput,
    FlushCacheReq,
    TokenizedGenerateReqInput,
)
from stages.v0_1_genesis.sampling_params import SamplingParams
from stages.v0_1_genesis.support import transport
from stages.v0_1_genesis.support.transport import (
    Receiver,
    Sender,
    ipc_endpoint,
    new_socket_dir,
    remove_socket_dir,
)


@pytest.fixture
def endpoint() -> Iterator[str]:
    made = ipc_endpoint(new_socket_dir(), "router")
    yield made
    remove_socket_dir(made)


HOSTILE_FRAMES = {
    "pickle": pickle.dumps({"rid": "x"}),
    "pickle that would run code": b"cos\nsystem\n(S'touch /tmp/strata-owned'\ntR.",
    "empty": b"",
    "truncated": msgspec.msgpack.encode(AbortReq("x"))[:-2],
    "trailing bytes": msgspec.msgpack.encode(AbortReq("x")) + b"\x00",
    "deep": b"\x91" * 200_000,
    "deep payload": b"\x83\xa4type\xaaControlOut\xa3rid\xa1x\xa7payload\x81\xa1a" + b"\x91" * 200_000,
    "array of 4 billion": b"\xdd\xff\xff\xff\xff",
    "map of 4 billion": b"\xdf\xff\xff\xff\xff",
    "bytes of 4 GB": b"\xc6\xff\xff\xff\xff",
    "bad UTF-8": b"\x82\xa4type\xa8AbortReq\xa3rid\xa1\xff",
    "unknown tag": msgspec.msgpack.encode({"type": "Evil", "rid": "x"}),
    "no tag": msgspec.msgpack.encode({"rid": "x"}),
    "unknown field": msgspec.msgpack.encode({"type": "AbortReq", "rid": "x", "more": 1}),
    "wrong type": msgspec.msgpack.encode({"type": "AbortReq", "rid": 7}),
    "json": b'{"type": "AbortReq", "rid": "x"}',
    "bad timestamp": b"\xc7\x0c\xff" + b"\xff" * 12,
    "10 MB of noise": b"\xc1" * (10 << 20),
}


def push_socket(endpoint: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 2000)
    socket.connect(endpoint)
    return socket


@pytest.mark.parametrize("name", HOSTILE_FRAMES)
@pytest.mark.parametrize("union", [EngineInput, DetokenizerInput])
def test_a_hostile_frame_is_dropped_and_the_next_message_arrives(
    endpoint: str, name: str, union: object
) -> None:
    async def run() -> object:
        receiver: Receiver[object] = Receiver(endpoint, union)
        hostile = push_socket(endpoint)
        hostile.send(HOSTILE_FRAMES[name])
        good = AbortReq("good") if union is EngineInput else ControlOut("good", {"a": [1, None]})
        hostile.send(msgspec.msgpack.encode(good))
        try:
            return await asyncio.wait_for(receiver.recv(), 10) == good
        finally:
            hostile.close()
            receiver.close()

    assert asyncio.run(run())
    assert not Path("/tmp/strata-owned").exists()


def test_a_multipart_message_is_dropped(endpoint: str) -> None:
    async def run() -> object:
        receiver: Receiver[EngineInput] = Receiver(endpoint, EngineInput)
        hostile = push_socket(endpoint)
        hostile.send_multipart([msgspec.msgpack.encode(AbortReq("x"))] * 2)
        hostile.send(msgspec.msgpack.encode(AbortReq("good")))
        message = await asyncio.wait_for(receiver.recv(), 10)
        receiver.close()
        return message

    assert asyncio.run(run()) == AbortReq("good")


def test_a_frame_over_the_limit_never_reaches_the_process(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "MAX_MESSAGE_BYTES", 1000)

    async def run() -> object:
        receiver: Receiver[EngineInput] = Receiver(endpoint, EngineInput)
        hostile, sender = push_socket(endpoint), Sender(endpoint)
        hostile.send(msgspec.msgpack.encode(AbortReq("x" * 2000)))
        await asyncio.sleep(0.2)
        sender.send(AbortReq("good"))
        message = await asyncio.wait_for(receiver.recv(), 10)
        receiver.close()
        return message

    assert asyncio.run(run()) == AbortReq("good")


def test_messages_arrive_whole_and_in_order_and_drain_takes_what_is_there(endpoint: str) -> None:
    params = SamplingParams(stop=["a", "é"], logit_bias={3: -1.5}, temperature=0.0, seed=-(2**63))
    sent: list[EngineInput] = [
        TokenizedGenerateReqInput("r1", [1, 2, 3], params, stream=True),
        AbortReq("r1"),
        FlushCacheReq("r2"),
    ]

    async def run() -> list[EngineInput]:
        receiver: Receiver[EngineInput] = Receiver(endpoint, EngineInput)
        sender = Sender(endpoint)
        assert receiver.drain() == []
        for message in sent:
            sender.send(message)
        first = await asyncio.wait_for(receiver.recv(), 10)
        await asyncio.sleep(0.2)
        rest = receiver.drain()
        # Draining must not make the waiting side miss what comes later.
        sender.send(AbortReq("later"))
        later = await asyncio.wait_for(receiver.recv(), 10)
        receiver.close()
        return [first, *rest, later]

    assert asyncio.run(run()) == [*sent, AbortReq("later")]


def test_a_sender_never_blocks_before_the_other_end_exists_nor_after_it_is_gone(endpoint: str) -> None:
    async def run() -> None:
        sender = Sender(endpoint)
        message = BatchTokenIDOut(["r"], [[1] * 100], [[]], [True], [{}], [None])
        for _ in range(5000):
            sender.send(message)
        receiver: Receiver[DetokenizerInput] = Receiver(endpoint, DetokenizerInput)
        assert await asyncio.wait_for(receiver.recv(), 10) == message
        receiver.close()
        for _ in range(5000):
            sender.send(message)
        sender.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_the_socket_folder_is_private_short_and_removable() -> None:
    folder = new_socket_dir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    endpoint = ipc_endpoint(folder, "detokenizer")
    assert len(endpoint) < 100
    remove_socket_dir(endpoint)
    remove_socket_dir(endpoint)
    assert not folder.exists()
    with pytest.raises(ValueError, match="longer than"):
        ipc_endpoint(Path("/tmp") / ("x" * 120), "router")
