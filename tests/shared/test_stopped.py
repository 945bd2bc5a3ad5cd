"""INV-LIVE with a process that is stopped, as by a debugger: it can do nothing for its end, and ends all the same."""

from __future__ import annotations

import os
import signal
import time

import pytest

from strata.adapters import ServerDriver

from .fixtures import model_folder

LIMIT_S = 5.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "role"),
    [
        pytest.param("--tp-size", "rank 1", marks=pytest.mark.needs("parallel.tensor")),
        pytest.param("--dp-size", "replica 1", marks=pytest.mark.needs("parallel.data")),
    ],
)
def test_a_stopped_process_ends_with_its_server(stage: str, flag: str, role: str) -> None:
    flags = ["--device", "cpu", "--max-total-tokens", "500", flag, "2"]
    with ServerDriver(stage, model_folder("llama"), flags) as server:
        pids = server.all_pids()
        server.kill(role, signal.SIGSTOP)
        asked_at = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        left = server.wait_gone(pids, LIMIT_S - (time.monotonic() - asked_at))
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert left == [], "INV-LIVE: orphans"
        assert server.process.wait(1) == 0
