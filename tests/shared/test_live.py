"""INV-LIVE: processes die together, whichever is killed, however; nobody hangs and nothing is left.

Each test has a server of its own. The 5 s are the invariant's, not a benchmark.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from strata.adapters import DIALECTS, ServerDriver, ServerError, existing_stages

from .fixtures import model_folder

LIMIT_S = 5.0
LONG = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 100_000}
CASES = [(stage, role) for stage in existing_stages() for role in DIALECTS[stage].roles]


@pytest.fixture
def server(stage: str) -> Iterator[ServerDriver]:
    with ServerDriver(stage, model_folder("llama"), ["--device", "cpu"]) as driver:
        yield driver


def socket_folders(pids: list[int]) -> set[Path]:
    """Folders of the Unix sockets that these processes have bound."""
    paths = (c.laddr for pid in pids for c in psutil.Process(pid).net_connections("unix"))
    return {Path(str(path)).parent for path in paths if str(path).startswith("/")}


class Pending:
    """Two requests in flight when something dies: a stream and a plain one."""

    def __init__(self, server: ServerDriver) -> None:
        self.server = server
        self.ends: dict[str, Any] = {}
        self.threads = [threading.Thread(target=self._ask, args=(kind,)) for kind in ("stream", "whole")]
        for thread in self.threads:
            thread.start()
        deadline = time.monotonic() + 10
        while server.client.get("/get_internal_state").json()["running"] < 2:
            assert time.monotonic() < deadline

    def _ask(self, kind: str) -> None:
        body = {"text": "count", "sampling_params": LONG, "stream": kind == "stream"}
        try:
            with httpx.Client(timeout=30, trust_env=False) as client:
                response = client.post(f"{self.server.base_url}/generate", json=body)
                self.ends[kind] = response
        except httpx.TransportError as error:
            self.ends[kind] = error

    def join(self, timeout_s: float) -> None:
        for thread in self.threads:
            thread.join(timeout_s)
            assert not thread.is_alive(), "INV-LIVE: a client hangs"


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "role"), CASES, scope="function")
def test_sigkill(server: ServerDriver, stage: str, role: str) -> None:
    pids = server.all_pids()
    assert set(server.pids()) == set(DIALECTS[stage].roles)
    folders = socket_folders(pids)
    assert folders and all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)
    pending = Pending(server)
    killed_at = time.monotonic()
    server.kill(role, signal.SIGKILL)
    pending.join(LIMIT_S)
    assert server.wait_gone(pids, LIMIT_S - (time.monotonic() - killed_at)) == [], "INV-LIVE: orphans"
    assert not any(folder.exists() for folder in folders), "the sockets' folder is left behind"
    code = server.process.wait(1)
    if role == "main":
        assert code == -signal.SIGKILL
        assert all(isinstance(end, httpx.TransportError) for end in pending.ends.values())
    else:
        assert code == 1
        assert role in server.tail(), "the log says who died"
        # Nobody gets a truncated answer that looks whole: a status or an event says that it failed.
        whole, stream = pending.ends["whole"], pending.ends["stream"]
        assert isinstance(whole, httpx.TransportError) or whole.status_code == 503
        if isinstance(stream, httpx.Response):
            events = [event for event in stream.text.split("\n\n") if event.startswith("data: {")]
            assert '"error"' in events[-1]
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.base_url}/health", timeout=2, trust_env=False)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "role"), [case for case in CASES if case[1] != "main"])
def test_health_is_false_while_dying(server: ServerDriver, stage: str, role: str) -> None:
    server.kill(role)
    deadline = time.monotonic() + LIMIT_S
    answers: list[int] = []
    while time.monotonic() < deadline:
        try:
            response = server.client.get("/health", timeout=2)
        except httpx.TransportError:
            break
        answers.append(response.status_code)
        time.sleep(0.005)
    else:
        raise AssertionError("INV-LIVE: still there after 5 s")
    # First answers may cross the death on its way; from the first 503 on it stays false.
    assert answers == sorted(answers), answers
    assert set(answers) <= {200, 503}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_signal_ends_it_cleanly(server: ServerDriver, number: signal.Signals) -> None:
    pids, folders = server.all_pids(), socket_folders(server.all_pids())
    pending = Pending(server)
    server.process.send_signal(number)
    pending.join(LIMIT_S)
    assert server.wait_gone(pids, LIMIT_S) == []
    assert server.process.wait(1) in (0, 128 + number, -number)
    assert not any(folder.exists() for folder in folders)
    assert "Traceback" not in server.log()


@pytest.mark.slow
def test_main_and_detokenizer_load_no_torch(server: ServerDriver) -> None:
    """DESIGN §8: it makes start-up and kill tests several times cheaper."""
    for role, pid in server.pids().items():
        maps = " ".join(region.path for region in psutil.Process(pid).memory_maps())
        assert ("libtorch" in maps) == (role not in ("main", "detokenizer")), role


def test_a_bad_start_is_one_clear_line(stage: str, tmp_path: Path) -> None:
    """No traceback, no process left, a code other than 0, and the mend."""
    for folder, words in ((tmp_path / "missing", "missing"), (tmp_path, "config.json")):
        driver = ServerDriver(stage, folder, ["--device", "cpu"])
        with pytest.raises(ServerError) as error:
            driver.start()
        assert words in str(error.value) and "Traceback" not in str(error.value)


def test_a_taken_port_is_named(servers: Any, stage: str) -> None:
    taken = servers(stage)
    driver = ServerDriver(stage, model_folder("llama"), ["--device", "cpu"])
    driver.command[driver.command.index("--port") + 1] = str(taken.port)
    driver.base_url = "http://127.0.0.1:9"
    driver.client = httpx.Client(base_url=driver.base_url, timeout=1, trust_env=False)
    with pytest.raises(ServerError) as error:
        driver.start()
    assert str(taken.port) in str(error.value) and "Traceback" not in str(error.value)
