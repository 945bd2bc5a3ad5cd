"""Tensor parallelism over several nodes: two "machines" on the loopback meet, agree, answer as one, end together."""

from __future__ import annotations

import importlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import pytest
from tokenizers import Tokenizer

from strata.adapters import DIALECTS, ServerDriver, ServerError, free_port

from .driving import greedy, prompt, solo
from .fixtures import EngineFactory, model_folder
from .speaking import generate, internal_state, probe, wait_idle
from .test_abort import LONG, leave_after
from .test_live import LIMIT_S, Pending, socket_folders

pytestmark = pytest.mark.needs("parallel.nodes")

TWO_NODES = ("--device", "cpu", "--tp-size", "2", "--nnodes", "2")


class OtherNode:
    """Node 1's processes, its log in a file."""

    def __init__(self, stage: str, *flags: str) -> None:
        launch = f"{DIALECTS[stage].package}.launch_server"
        self._log = tempfile.NamedTemporaryFile(prefix="strata-node-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", launch, "--model-path", str(model_folder("llama")), *flags],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    def pids(self) -> list[int]:
        """Main, then its children; the interpreter's helper is among them, the rank is last."""
        return [self.process.pid, *(child.pid for child in psutil.Process(self.process.pid).children())]

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


class TwoNodes:
    """A server of two nodes with one rank each; ``server`` drives node 0."""

    def __init__(self, stage: str, *flags: str) -> None:
        self.stage = stage
        self.address = ("127.0.0.1", free_port())
        self.flags = [*TWO_NODES, "--nccl-init-addr", "{}:{}".format(*self.address), *flags]
        self.server = ServerDriver(stage, model_folder("llama"), [*self.flags, "--node-rank", "0"])
        self.other: OtherNode | None = None

    def __enter__(self) -> Self:
        self.other = OtherNode(self.stage, *self.flags, "--node-rank", "1")
        try:
            self.server.start()
        except BaseException:
            self.other.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.server.stop()
        if self.other is not None:
            self.other.stop()


@pytest.fixture(scope="module")
def nodes(stage: str) -> Iterator[TwoNodes]:
    """A server whose queue has a random order, so that its ranks part ways unless they have one seed."""
    flags = ("--max-total-tokens", "600", "--max-running-requests", "3", "--schedule-heuristic", "random")
    with TwoNodes(stage, *flags) as pair:
        yield pair


@pytest.mark.slow
def test_two_nodes_answer_as_one_rank(nodes: TwoNodes, engines: EngineFactory, stage: str) -> None:
    tokenizer = Tokenizer.from_file(str(model_folder("llama") / "tokenizer.json"))
    prompts = [prompt(length, seed=60 + length) for length in (1, 6, 17, 18, 19, 20, 40, 100)]
    expected = [tokenizer.decode(solo(engines(stage), ids, greedy(24)).ids) for ids in prompts]
    with probe(nodes.server):
        for _ in range(2):
            answers = generate(nodes.server, input_ids=prompts, sampling_params=greedy(24))
            assert [answer["text"] for answer in answers] == expected
        assert internal_state(nodes.server)["cached_tokens"] > 100
        drawn = {"temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True}
        assert (
            len({answer["text"] for answer in generate(nodes.server, text=["a"] * 4, sampling_params=drawn)})
            == 4
        )
        leave_after(nodes.server, 0.3, {"text": "count", "sampling_params": {**LONG, "max_new_tokens": 500}})
        wait_idle(nodes.server)


@pytest.mark.slow
def test_what_node_1_is(nodes: TwoNodes) -> None:
    """One rank and a main without torch that takes no requests; node 0 has no further rank."""
    assert nodes.other is not None
    assert set(nodes.server.pids()) == set(nodes.server.dialect.roles)
    assert "node 1 is ready: rank 1 of 2" in nodes.other.log
    main, *_, rank = (psutil.Process(pid) for pid in nodes.other.pids())
    assert not [c for c in main.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    for process, loads_torch in ((main, False), (rank, True)):
        assert any("libtorch" in region.path for region in process.memory_maps()) == loads_torch
    for pid in (*nodes.server.all_pids(), *nodes.other.pids()):
        for connection in psutil.Process(pid).net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip == "127.0.0.1", connection


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["main of node 0", "main of node 1", "rank of node 1"])
def test_sigkill(stage: str, victim: str) -> None:
    """INV-LIVE over nodes: whichever process is killed, on whichever node, both nodes are gone within 5 s."""
    with TwoNodes(stage) as pair:
        server, other = pair.server, pair.other
        assert other is not None
        pids = [*server.all_pids(), *other.pids()]
        folders = socket_folders(pids)
        pending = Pending(server)
        killed_at = time.monotonic()
        if victim == "main of node 0":
            server.process.kill()
        else:
            psutil.Process(other.pids()[-1 if victim.startswith("rank") else 0]).kill()
        pending.join(LIMIT_S)
        whole = pending.ends["whole"]
        assert isinstance(whole, httpx.TransportError) or whole.status_code == 503
        other.process.wait(LIMIT_S)  # reaps it
        left = server.wait_gone(pids, LIMIT_S - (time.monotonic() - killed_at))
        assert left == [], "INV-LIVE: orphans"
        assert not any(folder.exists() for folder in folders)
        if victim == "main of node 0":
            assert other.process.returncode == 1 and "node 0 is gone" in other.log
        else:
            assert server.process.wait(1) == 1
            reason = "the rank 1 process was killed by SIGKILL" if victim.startswith("rank") else "it is gone"
            assert f"node 1: {reason}; the server ends" in server.log()
        assert "Traceback" not in server.log() + other.log


@pytest.mark.slow
def test_a_missing_node_is_named(stage: str) -> None:
    """Nobody waits for ever: each side names the address and who did not come."""
    pair = TwoNodes(stage, "--dist-timeout", "1")
    address = "{}:{}".format(*pair.address)
    alone = OtherNode(stage, *pair.flags, "--node-rank", "1")
    assert alone.process.wait(30) == 1
    assert f"node 0 did not answer at {address} within 1 s" in alone.log.splitlines()[-1]
    with pytest.raises(ServerError) as error:
        pair.server.start()
    assert f"node 1 did not come to {address} within 1 s" in str(error.value).splitlines()[-1]
    assert "Traceback" not in alone.log + str(error.value)


@pytest.mark.slow
def test_who_is_no_node_of_it_stays_out(stage: str) -> None:
    """A stranger and a node with other flags are sent away, and node 0 waits on for the right one.

    That one goes, too, when node 0 is asked to end.
    """
    pair = TwoNodes(stage)
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(pair.server.start)
        try:
            wrong = OtherNode(stage, *pair.flags, "--node-rank", "1", "--dtype", "bfloat16")
            assert wrong.process.wait(60) == 1
            assert "--dtype is bfloat16 on node 1 and auto on node 0" in wrong.log.splitlines()[-1]
            with socket.create_connection(pair.address, timeout=30) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert stranger.recv(100) == b""
            pair.other = OtherNode(stage, *pair.flags, "--node-rank", "1")
            start.result()
            assert generate(pair.server, text="hi", sampling_params={"max_new_tokens": 2})
            pids = pair.other.pids()
            pair.server.process.send_signal(signal.SIGTERM)
            assert pair.server.process.wait(LIMIT_S) == 0
            assert pair.other.process.wait(LIMIT_S) == 1
            assert pair.server.wait_gone(pids, LIMIT_S) == [], "INV-LIVE: orphans"
            assert "node 0 is gone" in pair.other.log and "Traceback" not in pair.other.log
        finally:
            pair.__exit__()


NODES: dict[str, Any] = {"nnodes": 2, "node_rank": 0, "tp_size": 2, "nccl_init_addr": "127.0.0.1:5000"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tp_size": 3}, "--tp-size 3 must be a multiple of --nnodes 2"),
        ({"nnodes": 0}, "--nnodes must be at least 1"),
        ({"nnodes": 1}, "pass --nnodes too"),
        ({"node_rank": 2}, r"--node-rank must be in \[0, 1\], got 2"),
        ({"node_rank": None}, "needs --node-rank"),
        ({"nccl_init_addr": None}, "--nccl-init-addr HOST:PORT"),
        ({"nccl_init_addr": "host"}, "must be HOST:PORT, as in 10.0.0.1:5000, got host"),
        ({"nccl_init_addr": "host:0"}, "must be HOST:PORT"),
        ({"nccl_init_addr": ":5000"}, "must be HOST:PORT"),
        ({"nccl_init_addr": "a..b:5000"}, "must be HOST:PORT, as in 10.0.0.1:5000, got a..b:5000"),
        ({"nccl_init_addr": "a" * 64 + ":5000"}, "must be HOST:PORT"),
        ({"dist_timeout": 0}, "--dist-timeout must be at least 1"),
    ],
)
def test_what_can_not_be_is_said(stage: str, fields: dict[str, Any], words: str) -> None:
    arguments = importlib.import_module(f"{DIALECTS[stage].package}.server_args")
    with pytest.raises(ValueError, match=words):
        arguments.ServerArgs(model_path="folder", **{**NODES, **fields}).check()
