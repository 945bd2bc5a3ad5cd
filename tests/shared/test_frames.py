"""Hostile ZMQ frames at the sockets of a live server: dropped, logged, and nothing else happens."""

from __future__ import annotations

import importlib
import os
import pickle
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

from strata.adapters import DIALECTS, ServerDriver

from .fixtures import ServerFactory
from .speaking import generate, probe


class Bomb:
    """Unpickling it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def endpoints(server: ServerDriver) -> list[str]:
    """Every Unix socket with a path that the server's processes have bound."""
    found = {
        connection.laddr
        for pid in server.all_pids()
        for connection in psutil.Process(pid).net_connections("unix")
        if isinstance(connection.laddr, str) and connection.laddr.startswith("/")
    }
    return sorted(f"ipc://{path}" for path in found)


def frames(bomb: Path) -> list[list[bytes]]:
    """Messages of one frame or several, none of which is a message of ours."""
    encode = msgspec.msgpack.encode
    valid = encode({"type": "AbortReq", "rid": "x"})
    deep = b"\x91" * 200_000
    return [
        [pickle.dumps(Bomb(bomb))],
        [pickle.dumps(Bomb(bomb), protocol=0)],
        [b""],
        [b"", b""],
        [valid[:-1]],
        [valid + b"\x00"],
        [valid, valid],
        [b"\x00" * 1000],
        [os.urandom(5000)],
        [deep],
        [b"\xdd\xff\xff\xff\xff"],
        [encode({"type": "NoSuchMessage", "rid": "x"})],
        [encode({"type": "AbortReq"})],
        [encode({"type": "AbortReq", "rid": 3})],
        [encode({"type": "AbortReq", "rid": "x", "more": 1})],
        [encode({"type": "TokenizedGenerateReqInput", "rid": "x", "input_ids": ["a"]})],
        [b'{"type": "AbortReq", "rid": "x"}'],
        [b"\xa1\xff"],
    ]


def test_hostile_frames(servers: ServerFactory, stage: str, tmp_path: Path) -> None:
    server, bomb = servers(stage), tmp_path / "bomb"
    pids = server.all_pids()
    with probe(server), zmq.Context() as context:
        targets = endpoints(server)
        assert len(targets) >= 3, "router, detokenizer and main each bind one"
        for endpoint in targets:
            with context.socket(zmq.PUSH) as socket:
                socket.linger = 2000
                socket.connect(endpoint)
                for message in frames(bomb):
                    socket.send_multipart(message)
                socket.send(b"\x01" * (80 << 20))  # over the limit: ZMQ hangs up
            assert generate(server, text="hi", sampling_params={"max_new_tokens": 2, "temperature": 0})
    assert server.all_pids() == pids
    time.sleep(0.1)
    assert not bomb.exists(), "something was unpickled"
    assert "dropped" in server.log()


def batch(stage: str, kind: str, **lists: list[Any]) -> dict[str, Any]:
    """A batch with the fields that the stage's messages have; ``lists`` are those that are the same in all."""
    others = {"vids": 1, "decoded_texts": "x", "logprobs": None}
    module = importlib.import_module(f"{DIALECTS[stage].package}.managers.io_struct")
    fields = getattr(module, kind).__struct_fields__
    count = len(lists["rids"])
    return {"type": kind, **lists, **{name: [others[name]] * count for name in fields if name in others}}


def test_well_formed_messages_of_a_stranger(servers: ServerFactory, stage: str) -> None:
    """Decodable but senseless: ids out of the vocabulary, unknown rids, lists that don't fit together."""
    server, encode = servers(stage), msgspec.msgpack.encode
    request = {"type": "TokenizedGenerateReqInput", "sampling_params": {}, "stream": False}
    messages = [
        encode({**request, "rid": "s1", "input_ids": [999_999]}),
        encode({**request, "rid": "s2", "input_ids": []}),
        encode({**request, "rid": "s3", "input_ids": [-5]}),
        encode({**request, "rid": "s4", "input_ids": [5] * 100_000}),
        encode({**request, "rid": "s5", "input_ids": [5], "sampling_params": {"temperature": -1.0}}),
        encode({**request, "rid": "s6", "input_ids": [5], "sampling_params": {"logit_bias": {9999: 1.0}}}),
        encode({**request, "rid": "s7", "input_ids": [5], "sampling_params": {"temperature": float("nan")}}),
        encode({**request, "rid": "s8", "input_ids": [5], "sampling_params": {"max_new_tokens": -3}}),
        encode({"type": "AbortReq", "rid": "stranger"}),
        encode({"type": "GetInternalStateReq", "rid": "stranger"}),
        encode({"type": "FlushCacheReq", "rid": "stranger"}),
        encode(
            batch(
                stage,
                "BatchTokenIDOut",
                rids=["a", "b"],
                output_tokens=[[1]],
                stop_strs=[],
                skip_special_tokens=[True],
                meta_info=[{}],
                finish_reason=[None],
            )
        ),
        encode(
            batch(
                stage,
                "BatchTokenIDOut",
                rids=["a"],
                output_tokens=[[-1, 10**9]],
                stop_strs=[[""]],
                skip_special_tokens=[True],
                meta_info=[{}],
                finish_reason=[None],
            )
        ),
        encode(
            batch(
                stage,
                "BatchStrOut",
                rids=["a", "b"],
                output_strs=["x"],
                meta_info=[],
                finish_reason=[],
            )
        ),
        encode({"type": "ControlOut", "rid": "stranger", "payload": {}}),
    ]
    pids = server.all_pids()
    with probe(server), zmq.Context() as context:
        for endpoint in endpoints(server):
            with context.socket(zmq.PUSH) as socket:
                socket.linger = 2000
                socket.connect(endpoint)
                for message in messages:
                    socket.send(message)
            assert generate(server, text="hi", sampling_params={"max_new_tokens": 2, "temperature": 0})
    assert server.all_pids() == pids
