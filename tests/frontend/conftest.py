"""One server around the fake router for all tests that only talk to it; it must end as clean as it began."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import pytest

from . import tiny_tokenizers

ROOT = Path(__file__).resolve().parents[2]
READY = re.compile(r"ready at (http://\S+)")


class FakeServer:
    """A server process started with ``flags``, its log, and a client for it."""

    def __init__(
        self, folder: Path, *flags: str, module: str = "tests.frontend.fake_server", **env: str
    ) -> None:
        self._log = tempfile.NamedTemporaryFile(prefix="strata-front-", suffix=".log")  # noqa: SIM115
        command = [sys.executable, "-m", module, "--model-path", str(folder), "--port", "0", *flags]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | env,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self.url = ""
        self.client = httpx.Client(timeout=20, trust_env=False)

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def wait_ready(self, timeout_s: float = 30) -> Self:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := READY.search(self.log):
                self.url = found[1]
                self.client.base_url = httpx.URL(self.url)
                return self
            time.sleep(0.02)
        raise AssertionError(f"not ready, exit code {self.process.poll()}:\n{self.log}")

    def wait_exit(self, timeout_s: float = 5) -> int:
        return self.process.wait(timeout_s)

    def tree(self) -> list[psutil.Process]:
        main = psutil.Process(self.process.pid)
        return [main, *main.children(recursive=True)]

    def child(self, index: int) -> psutil.Process:
        """0 is the router, 1 the detokenizer: in the order in which main starts them."""
        children = [p for p in self.tree()[1:] if "spawn_main" in " ".join(p.cmdline())]
        return sorted(children, key=lambda p: p.pid)[index]

    def socket_dir(self) -> Path:
        """Folder of the router's socket, as the kernel lists it."""
        paths = [c.laddr for c in self.child(0).net_connections("unix") if "strata-" in str(c.laddr)]
        return Path(str(paths[0])).parent

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.client.get("/get_internal_state").json()
        return state

    def wait_idle(self, timeout_s: float = 2) -> float:
        """Seconds until the router runs nothing."""
        started = time.monotonic()
        while self.state()["running"]:
            assert time.monotonic() - started < timeout_s, "requests still run in the router"
            time.sleep(0.01)
        return time.monotonic() - started

    def stop(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that passes every check; the fake router never opens its weights."""
    folder = tiny_tokenizers.write_folder(tmp_path_factory.mktemp("front") / "tiny-model")
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture(scope="session")
def shared_server(model_folder: Path) -> Iterator[FakeServer]:
    with FakeServer(model_folder) as server:
        yield server.wait_ready()
        server.wait_idle()
        assert "Traceback" not in server.log, server.log
        assert "a bug in" not in server.log, server.log


@pytest.fixture
def server(shared_server: FakeServer) -> Iterator[FakeServer]:
    yield shared_server
    shared_server.wait_idle()
