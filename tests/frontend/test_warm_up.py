"""A server that is told to end, or loses its engine, while it waits for its own warm-up request."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from .conftest import FakeServer

MODULE = "tests.frontend.silent_server"
pytestmark = pytest.mark.slow  # each test starts a server of its own


def wait_for(server: FakeServer, text: str, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while text not in server.log:
        assert time.monotonic() < deadline and server.process.poll() is None, server.log
        time.sleep(0.02)


def test_a_signal_ends_it(model_folder: Path) -> None:
    with FakeServer(model_folder, module=MODULE) as server:
        wait_for(server, "got TokenizedGenerateReqInput")
        assert "ready at" not in server.log, "ready before it was warm"
        server.process.terminate()
        assert server.wait_exit() == 0, server.log
        assert "Traceback" not in server.log


def test_a_dead_engine_ends_it(model_folder: Path) -> None:
    with FakeServer(model_folder, module=MODULE, SILENT_CONTROLLER="die") as server:
        assert server.wait_exit(30) == 1, server.log
        assert "controller" in server.log and "Traceback" not in server.log
