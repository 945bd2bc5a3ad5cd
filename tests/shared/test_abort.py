"""Clients that go away (probe B16, INV-FREE): the engine forgets them, and nobody else notices."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from strata.adapters import ServerDriver

from .driving import prompt
from .fixtures import ServerFactory
from .speaking import generate, internal_state, probe, wait_idle

LONG = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 1900}


@pytest.fixture
def server(servers: ServerFactory, stage: str) -> ServerDriver:
    return servers(stage)


@contextlib.contextmanager
def connected(server: ServerDriver, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A `/generate` request whose client goes away at the end of the block."""
    content = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + content)
        yield connection


def leave_after(server: ServerDriver, seconds: float, body: dict[str, Any]) -> None:
    """Go away after ``seconds``, or when the answer ends."""
    with connected(server, body) as connection, contextlib.suppress(TimeoutError):
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            if not connection.recv(1 << 16):
                return


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition never came true"
        time.sleep(0.01)


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "whole"])
def test_one_that_runs(server: ServerDriver, streaming: bool) -> None:
    with probe(server):
        before = internal_state(server)["generated_tokens"]
        leave_after(server, 0.15, {"text": "count", "sampling_params": LONG, "stream": streaming})
        wait_idle(server)
        assert 0 < internal_state(server)["generated_tokens"] - before < 1900


@pytest.mark.slow
def test_while_queued(servers: ServerFactory, stage: str) -> None:
    """The pool is full of one request; another waits, and goes while it waits."""
    server = servers(stage, "llama", "--max-total-tokens", "2000")
    runs = {"input_ids": prompt(100, 60), "sampling_params": {**LONG, "max_new_tokens": 1800}}
    waits = {"input_ids": prompt(900, 61), "sampling_params": LONG}

    def counts() -> tuple[int, int]:
        state = internal_state(server)
        return state["running"], state["waiting"]

    with probe(server), connected(server, runs):
        wait_until(lambda: counts() == (1, 0))
        with connected(server, waits):
            wait_until(lambda: counts() == (1, 1))
        wait_until(lambda: counts() == (1, 0))


def test_a_list_goes_as_one(server: ServerDriver) -> None:
    """Probe B16: many prompts of one call; all of them are given up."""
    with probe(server):
        before = internal_state(server)["generated_tokens"]
        bodies = {"input_ids": [prompt(5, seed) for seed in range(10)], "sampling_params": LONG}
        leave_after(server, 0.2, {**bodies, "stream": True})
        wait_idle(server)
        assert internal_state(server)["generated_tokens"] - before < 10 * 1900


@pytest.mark.slow
def test_others_are_not_disturbed(server: ServerDriver) -> None:
    """Answers of those who stay, byte for byte, while others come and go."""
    ask: dict[str, Any] = {"text": "The quick brown", "sampling_params": {**LONG, "max_new_tokens": 120}}
    with probe(server):
        expected = generate(server, **ask)["text"]
        stop = threading.Event()

        def come_and_go() -> None:
            rng = random.Random(1)
            while not stop.is_set():
                leave_after(server, rng.uniform(0.0, 0.05) + 0.001, {"text": "go", "sampling_params": LONG})

        others = [threading.Thread(target=come_and_go) for _ in range(3)]
        for thread in others:
            thread.start()
        try:
            for _ in range(4):
                assert generate(server, **ask)["text"] == expected
        finally:
            stop.set()
            for thread in others:
                thread.join()


@pytest.mark.slow
def test_a_thousand_at_random_moments(servers: ServerFactory, stage: str) -> None:
    """Probe B16: streams and others, short and long prompts, cut anywhere from the head to the answer."""
    server = servers(stage, "llama", "--max-total-tokens", "3000")
    with probe(server):
        errors: list[BaseException] = []

        def leave_often(seed: int) -> None:
            rng = random.Random(seed)
            try:
                for _ in range(125):
                    body = {
                        "input_ids": prompt(rng.choice([1, 30, 400, 1500]), rng.randrange(5)),
                        "sampling_params": {**LONG, "max_new_tokens": rng.choice([1, 20, 500])},
                        "stream": rng.random() < 0.5,
                    }
                    leave_after(server, rng.choice([0.001, 0.01, 0.03, 0.1]), body)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=leave_often, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors[0]
        wait_idle(server, 30.0)


def test_connections_that_say_nothing_or_half(server: ServerDriver) -> None:
    with probe(server):
        held = []
        for opening in (b"", b"POST /gen", b"POST /generate HTTP/1.1\r\ncontent-length: 100\r\n\r\n{"):
            connection = socket.create_connection(("127.0.0.1", server.port))
            connection.sendall(opening)
            held.append(connection)
        assert generate(server, text="hi", sampling_params={"max_new_tokens": 2})
        for connection in held:
            connection.close()
