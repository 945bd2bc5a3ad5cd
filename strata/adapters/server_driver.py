"""Starts a stage's real server as a child process, waits for it, finds its processes, ends it.

Used by the tests, `strata tour` and the benches. Lives as long as its server; imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil

from .dialects import DIALECTS

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0


class ServerError(RuntimeError):
    """The server did not start, or is gone; the message ends with the last lines of its log."""


def free_port() -> int:
    """A TCP port on the loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerDriver:
    """One server: ``with ServerDriver("v0.1", folder, ["--max-total-tokens", "512"]) as server: …``."""

    def __init__(
        self, stage: str, model_path: Path, flags: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> None:
        self.stage = stage
        self.dialect = DIALECTS[stage]
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.command = [
            *(sys.executable, "-m", f"{self.dialect.package}.launch_server"),
            *("--model-path", str(model_path), "--port", str(self.port), *flags),
        ]
        self.env = {**os.environ, **(env or {})}
        self.client = httpx.Client(base_url=self.base_url, timeout=60.0, trust_env=False)
        self._log = tempfile.NamedTemporaryFile(prefix="strata-server-", suffix=".log")  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("the server was not started")
        return self._process

    def start(self) -> None:
        """Spawn the server in a process group of its own and return when it is healthy."""
        self._process = subprocess.Popen(
            self.command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=self.env,
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerError(f"server ended with code {self.process.returncode}.\n{self.tail()}")
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/health", timeout=5.0).status_code in (200, 401):
                    return
            time.sleep(0.05)
        raise ServerError(f"server not ready after {READY_TIMEOUT_S:.0f} s.\n{self.tail()}")

    def log(self) -> str:
        """All that the server has printed so far."""
        return Path(self._log.name).read_text(errors="replace")

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log().splitlines()[-lines:])

    def pids(self) -> dict[str, int]:
        """Process id by role, as the process table shows them: every parent starts its children in their order."""
        main = psutil.Process(self.process.pid)
        engine, detokenizer = _workers_of(main)[:2]
        roles = dict(zip(self.dialect.roles, (main.pid, engine.pid, detokenizer.pid), strict=True))
        if "--dp-size" in self.command:
            replicas = _workers_of(engine)
            return roles | {f"replica {number}": replica.pid for number, replica in enumerate(replicas)}
        ranks = enumerate(_workers_of(engine), start=self.dialect.first_rank)
        return roles | {f"rank {number}": rank.pid for number, rank in ranks}

    def all_pids(self) -> list[int]:
        """Every process of the server, helpers of the interpreter included."""
        main = psutil.Process(self.process.pid)
        return [main.pid, *(child.pid for child in main.children(recursive=True))]

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pids()[role], number)

    def wait_gone(self, pids: Sequence[int], timeout_s: float) -> list[int]:
        """The pids of ``pids`` that still live after ``timeout_s``; returns as soon as none does."""
        deadline = time.monotonic() + timeout_s
        while alive := [pid for pid in pids if _is_alive(pid)]:
            self.process.poll()  # reaps the main process
            if time.monotonic() >= deadline:
                return alive
            time.sleep(0.02)
        return []

    def stop(self) -> None:
        """End the server politely, then by force. Safe to call twice."""
        if self._process is None:
            return
        self.client.close()
        pids = self.all_pids() if self._process.poll() is None else []
        if pids:
            self._process.send_signal(signal.SIGTERM)
        for pid in self.wait_gone(pids, STOP_TIMEOUT_S):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None


def _die_with_parent() -> None:
    """Runs in the child before its program: end politely when the process that drives it is gone, even killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _workers_of(process: psutil.Process) -> list[psutil.Process]:
    """Its children in the order in which they were started, the interpreter's resource tracker left out."""
    workers = [child for child in process.children() if "multiprocessing.spawn" in " ".join(child.cmdline())]
    return sorted(workers, key=lambda child: (child.create_time(), child.pid))
