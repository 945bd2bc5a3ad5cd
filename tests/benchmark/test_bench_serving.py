"""`bench_serving` as a user runs it: against real servers of every stage, against a bad one, and with bad flags."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stages.v0_2_cudagraph import STAGE, bench_serving
from strata.adapters import ServerDriver
from tests.models.tiny import tiny_llama
from tests.shared.fixtures import ServerFactory
from tests.shared.speaking import internal_state, wait_idle

from .stub_server import StubServer

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "stages.v0_2_cudagraph.bench_serving"]
SMALL = ("--random-input-len", "40", "--random-output-len", "12", "--num-prompts", "12")
COUNT = 12


def bench(url: str, *flags: str, out: Path | None = None) -> int:
    """Run in this process: what the command line would return."""
    output = ("--output-file", str(out)) if out else ()
    return bench_serving.main(["--base-url", url, *SMALL, *output, *flags])


@pytest.fixture
def server(servers: ServerFactory, stage: str) -> ServerDriver:
    driver = servers(stage, "llama")
    wait_idle(driver)
    driver.client.post("/flush_cache")
    return driver


@pytest.mark.parametrize("backend", ["strata", "openai", "openai-chat"])
def test_a_real_server(
    server: ServerDriver, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every token that the engine generated is in the report, warm-up aside."""
    before = internal_state(server)
    out = tmp_path / "run.json"
    assert bench(server.base_url, "--backend", backend, "--warmup-requests", "0", out=out) == 0
    after = wait_idle(server)
    report = json.loads(out.read_text())
    assert (report["completed"], report["failed"], report["errors"]) == (COUNT, 0, {})
    assert report["output_tokens"] == after["generated_tokens"] - before["generated_tokens"]
    if backend == "strata":
        cached = after["cached_tokens"] - before["cached_tokens"]
        computed = after["prefill_tokens"] - before["prefill_tokens"]
        assert report["cached_tokens"] == cached
        assert report["prompt_tokens"] == cached + computed
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        spread = report[name]
        assert 0 < spread["median"] <= spread["p90"] <= spread["p99"]
        assert spread["mean"] > 0
    assert report["ttft_ms"]["median"] < report["e2e_ms"]["median"]
    assert 0 < report["concurrency"] <= COUNT
    printed = capsys.readouterr().out
    for words in (
        "completed requests",
        "output throughput",
        "time to first token",
        "inter-token latency",
        "p99",
    ):
        assert words in printed


def test_shared_prefixes_are_cached(server: ServerDriver, tmp_path: Path) -> None:
    """All of a group but its first find the prefix: here 12 prompts in 3 groups, asked one by one."""
    flags = ("--dataset-name", "shared-prefix", "--shared-prefix-len", "60", "--shared-prefix-groups", "3")
    out = tmp_path / "run.json"
    assert bench(server.base_url, *flags, "--max-concurrency", "1", "--flush-cache", out=out) == 0
    report = json.loads(out.read_text())
    assert report["prompt_tokens"] > 12 * 60
    assert 9 * 60 <= report["cached_tokens"] < 9 * 61 + 12
    assert report["concurrency"] <= 1.0


def test_sharegpt_and_a_rate(server: ServerDriver, tmp_path: Path) -> None:
    turns = [{"value": "The quick brown fox jumps"}, {"value": "over the lazy dog, and then again"}]
    path = tmp_path / "c.json"
    path.write_text(json.dumps([{"conversations": turns}] * COUNT))
    out = tmp_path / "run.json"
    flags = ("--dataset-name", "sharegpt", "--dataset-path", str(path), "--request-rate", "200")
    assert bench(server.base_url, *flags, "--sharegpt-output-len", "5", out=out) == 0
    report = json.loads(out.read_text())
    assert report["output_tokens"] == 5 * COUNT
    assert report["args"]["request_rate"] == 200.0


def test_what_is_written_tells_how_to_run_it_again(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    with StubServer(["whole"], api_key="secret") as server:
        assert bench(server.url, "--api-key", "secret", "--seed", "7", out=out) == 0
    assert "secret" not in out.read_text()
    report = json.loads(out.read_text())
    assert report["stage"] == STAGE and report["date"] and report["versions"]["httpx"]
    assert report["args"]["seed"] == 7 and report["args"]["request_rate"] == "inf"
    assert report["server"] == {"model": "stub", "vocab_size": 500}
    assert report["interrupted"] is False


def test_the_same_seed_asks_the_same(tmp_path: Path) -> None:
    asked = []
    for seed in ("3", "3", "4"):
        with StubServer(["whole"]) as server:
            assert bench(server.url, "--seed", seed, "--max-concurrency", "1") == 0
            asked.append(server.bodies)
    assert asked[0] == asked[1] != asked[2]
    warm_up, first = asked[0][0]["input_ids"], asked[0][1]["input_ids"]
    assert warm_up != first and sorted(warm_up) == sorted(first), "a warm-up warms no cache"
    assert len(asked[0]) == COUNT + 1


def test_failures_are_counted_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.json"
    with StubServer(["whole", "slow", "500", "cut"]) as server:
        code = bench(server.url, "--warmup-requests", "0", "--max-concurrency", "1", out=out)
    assert code == 1
    report = json.loads(out.read_text())
    assert (report["completed"], report["failed"]) == (6, 6)
    assert report["errors"] == {"HTTP 500: out of luck": 3, "the stream ended before [DONE]": 3}
    assert report["prompt_tokens"] == 6 * 7, "failed requests count for nothing"
    assert "first error: HTTP 500: out of luck" in capsys.readouterr().out


def test_the_limit_holds_over_http() -> None:
    with StubServer(["together"], together=3) as server:
        assert bench(server.url, "--max-concurrency", "3", "--warmup-requests", "0") == 0
        assert server.most_at_once == 3


@pytest.mark.slow
def test_requests_under_way_may_outnumber_the_usual_limit_of_open_files() -> None:
    flags = (*SMALL, "--num-prompts", "80", "--warmup-requests", "0")
    with StubServer(["together"], together=80) as server:
        command = shlex.join([*COMMAND, "--base-url", server.url, *flags])
        ran = subprocess.run(
            ["bash", "-c", f"ulimit -Sn 64; {command}"], capture_output=True, text=True, timeout=60
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert server.most_at_once == 80


def test_ctrl_c_reports_what_is_complete(tmp_path: Path) -> None:
    """Four at a time: once the four endless answers have begun, the eight before them have ended."""
    out = tmp_path / "run.json"
    with StubServer(["whole"] * 8 + ["endless"] * 4) as server:
        command = [
            *COMMAND,
            "--base-url",
            server.url,
            *SMALL,
            "--warmup-requests",
            "0",
            "--max-concurrency",
            "4",
        ]
        process = subprocess.Popen(
            [*command, "--output-file", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 60
        while len(server.bodies) < COUNT and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
        assert server.hung_up.wait(10), "the server is told that nobody waits any more"
    assert process.returncode == 130, errors
    assert "Interrupted: 8 of 12 requests had ended." in printed
    assert "Traceback" not in errors
    report = json.loads(out.read_text())
    assert report["interrupted"] and (report["completed"], report["failed"]) == (8, 0)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--random-output-len", "0"], "--random-output-len must be at least 1"),
        (["--max-concurrency", "0"], "--max-concurrency must be at least 1"),
        (["--random-range-ratio", "1.5"], "--random-range-ratio must be in [0, 1]"),
        (["--random-range-ratio", "nan"], "--random-range-ratio must be in [0, 1]"),
        (["--request-rate", "0"], "--request-rate must be above 0"),
        (["--request-rate", "nan"], "--request-rate must be above 0"),
        (["--dataset-name", "sharegpt"], "--dataset-path"),
        (["--dataset-path", "x.json"], "--dataset-name sharegpt"),
        (["--dataset-name", "sharegpt", "--dataset-path", "/nowhere.json"], "--tokenizer"),
        (["--backend", "openai-chat"], "--tokenizer"),
        (["--tokenizer", "/nowhere"], "/nowhere/tokenizer.json"),
        (["--extra-request-body", "[1]"], "--extra-request-body must be a JSON object"),
        (["--base-url", "localhost:30000"], "--base-url must begin with http"),
        (["--base-url", "http://[::1"], "--base-url http://[::1 is no URL"),
        (["--base-url", "http://127.0.0.1:port"], "--base-url http://127.0.0.1:port is no URL"),
        (["--output-file", "/"], "--output-file / is a folder: name a file in it"),
        (["--output-file", "/nowhere/run.json"], "--output-file /nowhere/run.json: there is no such folder"),
    ],
)
def test_wrong_flags_are_one_line(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with StubServer(["whole"]) as server:
        assert bench(server.url, *flags) == 2
        assert not server.bodies
    error = capsys.readouterr().err
    assert says in error and len(error.splitlines()) == 1


def test_a_server_without_a_vocabulary_needs_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    with StubServer(["whole"], is_strata=False) as server:
        assert bench(server.url) == 2
        assert "pass --tokenizer FOLDER" in capsys.readouterr().err
        assert bench(server.url, "--tokenizer", str(tiny_llama("llama"))) == 0
        ids = [i for body in server.bodies for i in body["input_ids"]]
        assert min(ids) >= 3 and max(ids) < 384


@pytest.mark.parametrize(
    ("ways", "options", "says"),
    [
        (["500"], {}, "the warm-up request failed: HTTP 500: out of luck"),
        (["whole"], {"api_key": "other"}, "wants a key: pass --api-key"),
    ],
)
def test_a_server_that_can_not_be_loaded_is_one_line(
    ways: list[str], options: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with StubServer(ways, **options) as server:
        assert bench(server.url) == 1
    error = capsys.readouterr().err
    assert says in error and len(error.splitlines()) == 1


def test_a_key_is_sent_in_utf_8() -> None:
    with StubServer(["whole"], api_key="clé") as server:
        assert bench(server.url, "--api-key", "clé") == 0


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("http://127.0.0.1:9") == 1
    error = capsys.readouterr().err
    assert "no server answers at http://127.0.0.1:9" in error and len(error.splitlines()) == 1


def test_the_load_generator_brings_in_no_torch() -> None:
    code = (
        "import sys; import stages.v0_2_cudagraph.bench_serving;"
        "print([m for m in ('torch', 'transformers', 'triton', 'fastapi') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_help_names_every_flag() -> None:
    ran = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True)
    for flag in ("--backend", "--dataset-name", "--request-rate", "--max-concurrency", "--output-file"):
        assert flag in ran.stdout
    assert "inter-token latency    the wait for each further token" in ran.stdout
    assert "(default: None)" not in ran.stdout
