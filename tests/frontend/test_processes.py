"""INV-LIVE: all processes of a server start together and end together, whatever is killed and whenever."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from stages.v0_1_genesis.server import Runtime

from . import tiny_tokenizers
from .conftest import ROOT, FakeServer

pytestmark = pytest.mark.slow  # each test starts servers of its own

LONG = {"text": "the", "sampling_params": {"max_new_tokens": 200}}
LOG_LINE = re.compile(r"\[\d\d:\d\d:\d\d\] (main|router|detokenizer): .+")


def gone(processes: list[psutil.Process], timeout_s: float = 5) -> bool:
    _, alive = psutil.wait_procs(processes, timeout_s)
    return not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("which", [0, 1], ids=["router", "detokenizer"])
def test_a_killed_child_makes_health_false_and_ends_the_server(model_folder: Path, which: int) -> None:
    with FakeServer(model_folder, FAKE_ROUTER_STEP_S="0.1") as server, ThreadPoolExecutor(2) as pool:
        server.wait_ready()
        processes, sockets = server.tree(), server.socket_dir()
        plain = pool.submit(httpx.post, f"{server.url}/generate", json=LONG, timeout=10)
        stream = pool.submit(httpx.post, f"{server.url}/generate", json=LONG | {"stream": True}, timeout=10)
        time.sleep(0.6)
        killed = time.monotonic()
        server.child(which).kill()
        assert plain.result().status_code == 503
        assert plain.result().json()["error"]["type"] == "server_error"
        assert '"error"' in stream.result().text
        assert time.monotonic() - killed < 5  # INV-LIVE
        assert server.client.get("/health").status_code == 503
        assert server.client.post("/generate", json=LONG).status_code == 503
        assert server.wait_exit(5) == 1
        assert gone(processes, killed + 5 - time.monotonic())
        assert not sockets.exists()
        assert "killed by SIGKILL" in server.log
        assert "Traceback" not in server.log, server.log


def test_a_killed_main_takes_its_children_and_its_sockets_along(model_folder: Path) -> None:
    with FakeServer(model_folder) as server:
        server.wait_ready()
        processes, sockets = server.tree(), server.socket_dir()
        assert sockets.exists()
        server.process.kill()
        assert gone(processes)
        assert not sockets.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("busy", [False, True])
def test_a_signal_ends_everything_quickly_and_cleanly(
    model_folder: Path, number: signal.Signals, busy: bool
) -> None:
    with FakeServer(model_folder, FAKE_ROUTER_STEP_S="0.1") as server, ThreadPoolExecutor(1) as pool:
        server.wait_ready()
        processes, sockets = server.tree(), server.socket_dir()
        if busy:
            answer = pool.submit(
                httpx.post, f"{server.url}/generate", json=LONG | {"stream": True}, timeout=10
            )
            time.sleep(0.5)
        sent = time.monotonic()
        # As a terminal does on Ctrl-C: to every process of the group.
        for process in processes if number == signal.SIGINT else processes[:1]:
            process.send_signal(number)
        assert server.wait_exit(5) == 0
        assert time.monotonic() - sent < 5
        assert gone(processes)
        assert not sockets.exists()
        assert "Traceback" not in server.log, server.log
        if busy:
            assert "ending" in answer.result().text


@pytest.mark.parametrize("delay_s", [0.3, 0.8, 1.3, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_at_any_moment_of_the_start_ends_cleanly(
    model_folder: Path, number: signal.Signals, delay_s: float
) -> None:
    flags = ["--load-format", "dummy", "--max-total-tokens", "500"]
    with FakeServer(model_folder, *flags, module="stages.v0_1_genesis.launch_server") as server:
        time.sleep(delay_s)
        processes = server.tree()
        if number == signal.SIGINT:
            os.killpg(server.process.pid, number)
        else:
            server.process.send_signal(number)
        assert server.wait_exit(5) == 0, server.log
        assert gone(processes)
        assert "Traceback" not in server.log, server.log


def test_sigterm_to_all_processes_is_no_accident(model_folder: Path) -> None:
    with FakeServer(model_folder) as server:
        server.wait_ready()
        os.killpg(server.process.pid, signal.SIGTERM)
        assert server.wait_exit(5) == 0, server.log


def test_a_signal_while_loading_ends_everything_cleanly(model_folder: Path) -> None:
    with FakeServer(model_folder, FAKE_ROUTER="slow") as server:
        while "loading" not in server.log:
            time.sleep(0.01)
        time.sleep(0.3)
        processes = server.tree()
        server.process.terminate()
        assert server.wait_exit(5) == 0
        assert gone(processes)
        assert "Traceback" not in server.log, server.log


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("refuse", "--max-total-tokens 1 is too small"),
        ("crash", "a bug while loading"),
        ("die", "the router process ended with exit code 7 while starting"),
    ],
)
def test_a_child_that_cannot_start_ends_the_server_with_its_reason(
    model_folder: Path, behaviour: str, said: str
) -> None:
    with FakeServer(model_folder, FAKE_ROUTER=behaviour) as server:
        assert server.wait_exit(20) == 1
        assert said in server.log.splitlines()[-1]
        assert ("Traceback" in server.log) == (behaviour == "crash")


BROKEN_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "bad config": (lambda f: (f / "config.json").write_text("{"), "config.json is no valid JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "must hold a JSON object"),
    "architecture": (
        lambda f: tiny_tokenizers.write_folder(f, {"architectures": ["GPT2LMHeadModel"]}),
        "LlamaForCausalLM",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "bad tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json cannot be read"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "--load-format dummy"),
    "pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pickles"),
    "rope": (lambda f: tiny_tokenizers.write_folder(f, {"rope_scaling": {"rope_type": "yarn"}}), "yarn"),
}


@pytest.mark.parametrize("name", BROKEN_FOLDERS)
def test_a_folder_that_cannot_be_served_is_one_clear_line_before_any_process(
    tmp_path: Path, name: str
) -> None:
    folder = tiny_tokenizers.write_folder(tmp_path)
    (folder / "model.safetensors").touch()
    change, said = BROKEN_FOLDERS[name]
    change(folder)
    check_refused(folder, said)


def check_refused(folder: Path, said: str, *flags: str) -> None:
    with FakeServer(folder, *flags, module="stages.v0_1_genesis.launch_server") as server:
        assert server.wait_exit(20) == 2
        [line] = server.log.splitlines()
        assert LOG_LINE.fullmatch(line)
        assert said in line


def test_wrong_arguments_are_one_clear_line(model_folder: Path, tmp_path: Path) -> None:
    check_refused(tmp_path / "nowhere", "strata model fetch")
    check_refused(model_folder, "--api-key", "--host", "0.0.0.0")
    check_refused(model_folder, "--tp-size", "--tp-size", "0")
    check_refused(model_folder, "--host", "--host", "no.such.host.invalid", "--allow-remote-without-key")


def test_a_taken_port_is_one_clear_line_before_the_model_loads(model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        check_refused(model_folder, f"--port {port}", "--port", port)


def test_the_log_has_one_format_and_ends_with_a_command_that_works(model_folder: Path) -> None:
    with FakeServer(model_folder, FAKE_ROUTER="slow") as server:
        server.wait_ready()
        time.sleep(0.2)
        for line in server.log.splitlines():
            assert LOG_LINE.fullmatch(line), line
        command = server.log.partition("try: ")[2].strip()
        shown = subprocess.run(command, shell=True, capture_output=True, timeout=20, check=True).stdout
        assert b'"text"' in shown


def test_main_and_detokenizer_never_load_torch_or_transformers(shared_server: FakeServer) -> None:
    for process in (shared_server.tree()[0], shared_server.child(1)):
        maps = {Path(region.path).name for region in process.memory_maps()}
        assert not [name for name in maps if "torch" in name], process
    code = (
        "import sys, stages.v0_1_genesis.launch_server, stages.v0_1_genesis.server,"
        " stages.v0_1_genesis.managers.detokenizer_manager;"
        "print([m for m in ('torch', 'transformers', 'triton') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_launch_server_itself_stays_light_for_the_children() -> None:
    code = (
        "import sys; before = set(sys.modules); import stages.v0_1_genesis.launch_server;"
        "print([m for m in sorted(set(sys.modules) - before) if not m.startswith('stages')])"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(shown.stdout.split(",")) < 12, shown.stdout


def test_runtime_tells_why_a_server_did_not_start(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"exit code 2(.|\n)*is not a folder"):
        Runtime(str(tmp_path / "nowhere"))
