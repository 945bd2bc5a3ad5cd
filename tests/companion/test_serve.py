"""`strata serve` becomes a stage's real server; `chat` and `tour` start and end one. Tiny model, all stages."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.companion.strata_command import strata
from tests.models.tiny import tiny_llama

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> str:
    return str(tiny_llama("llama"))


class Served:
    """``strata serve`` in a process, its log followed line by line."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.log = folder / "log"
        # From another working folder: the checkout is found all the same.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "strata", "serve", *arguments],
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def wait_for(self, pattern: str) -> str:
        """The first group of ``pattern`` in the log, as soon as it is there."""
        deadline = time.monotonic() + 120
        while not (found := re.search(pattern, self.log.read_text(), re.MULTILINE)):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        return found[1]


@pytest.fixture
def served(stage: str, model: str, tmp_path: Path) -> Iterator[Served]:
    server = Served(tmp_path, stage, "--model-path", model, "--port", "0", "--device", "cpu")
    yield server
    if server.process.poll() is None:
        server.process.kill()
        server.process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_the_printed_curl_line_works_and_a_signal_ends_all(served: Served, number: signal.Signals) -> None:
    command = served.wait_for(r"(curl http.*)$")
    answer = subprocess.run(
        f"{command} -s --fail-with-body", shell=True, capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 0 and '"completion_tokens"' in answer.stdout, answer
    # The process that we started is the server itself: it has the children, and takes the signal.
    children = psutil.Process(served.process.pid).children(recursive=True)
    assert len(children) >= 2
    served.process.send_signal(number)
    assert served.process.wait(30) == 0, served.log.read_text()
    assert "Traceback" not in served.log.read_text()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_the_stage_has_the_last_word_on_flags(stage: str, model: str) -> None:
    listed = strata("serve", stage, "--help")
    assert listed.code == 0 and "--max-total-tokens" in listed.out
    unknown = strata("serve", stage, "--model-path", model, "--nope")
    assert unknown.code == 2 and "--nope" in unknown.err and "Traceback" not in unknown.err


def test_a_taken_port_is_one_line(stage: str, model: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ran = strata("serve", stage, "--model-path", model, "--port", port)
    assert ran.is_one_line_error() and port in ran.err, ran


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_a_missing_model_folder_is_named(stage: str, command: str) -> None:
    ran = strata(command, stage, "--model-path", "/nowhere")
    assert ran.code == 2 and "/nowhere" in ran.err.splitlines()[-1] and "Traceback" not in ran.err, ran


def test_chat_starts_and_ends_its_own_server(stage: str, model: str) -> None:
    before = {process.pid for process in psutil.process_iter()}
    ran = strata("chat", stage, "--model-path", model, "--max-tokens", "3", stdin="hello\n")
    assert ran.code == 0 and ran.out.endswith("\n"), ran
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before and _serves(p, model)]


def test_tour_shows_every_stage_without_a_terminal() -> None:
    ran = strata("tour", "--max-tokens", "8", timeout=250)
    assert ran.code == 0, ran
    for line in strata("stages").out.splitlines():
        assert line.split()[0] in ran.out
    assert "Paris" in ran.out


def test_doctor_finds_all_that_a_cpu_needs() -> None:
    ran = strata("doctor")
    assert ran.code == 0, ran
    assert re.search(r"^ok +model ", ran.out, re.MULTILINE)
    assert re.search(r"^ok +attention +torch", ran.out, re.MULTILINE)


def test_doctor_names_the_command_for_a_missing_model(tmp_path: Path) -> None:
    ran = strata("doctor", STRATA_CACHE=str(tmp_path))
    assert ran.code == 1
    assert re.search(r"^missing +model .*->  strata model fetch$", ran.out, re.MULTILINE)


def _serves(process: psutil.Process, model: str) -> bool:
    return model in (process.info["cmdline"] or [])
