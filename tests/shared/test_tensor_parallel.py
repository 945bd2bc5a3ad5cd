"""Tensor parallelism: two ranks answer as one does, stay equal to each other, and die together.

On the CPU the ranks talk through gloo; tests marked ``cuda2`` do the same on two GPUs through NCCL.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import httpx
import psutil
import pytest
from tokenizers import Tokenizer

from strata.adapters import DIALECTS, ServerDriver, ServerError, existing_stages
from tests.models.tiny import TINY_MODELS

from .driving import greedy, prompt, solo
from .fixtures import ServerFactory, model_folder
from .rank_pair import MODELS, engine_maker, models_of, run_ranks, workload
from .reference import reference
from .speaking import generate, internal_state, probe, stream, wait_idle
from .test_abort import leave_after
from .test_live import LIMIT_S, Pending, socket_folders

pytestmark = pytest.mark.needs("parallel.tensor")

TWO_RANKS = ("--tp-size", "2")
POOL = ("--max-total-tokens", "2048")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.cuda2])]
KILLS = [
    (stage, role, busy)
    for stage in existing_stages()
    for role in DIALECTS[stage].roles_at(2)
    if role != "detokenizer"
    for busy in ((True, False) if role.startswith("rank") else (True,))
]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_ranks_do_what_one_does(stage: str, device: str) -> None:
    """Greedy and sampled tokens, ends, retractions: equal on both ranks, and equal to one rank's on the CPU."""
    first, second = run_ranks(stage, device)
    assert first == second, "the ranks went different ways"
    alone = workload(stage, engine_maker(stage, device="cpu"))
    for what in alone:
        assert first[what] == alone[what], what
    modes = ["decode", "extend", "prefill"]
    can = [mode.upper() for mode in modes if f"forward_mode.{mode}" in DIALECTS[stage].capabilities]
    assert first["modes"] == can
    assert first["retractions"] >= 2
    for model in models_of(stage):
        for rid, (ids, _) in first[model].items():
            wave, length = map(int, rid.split("/"))
            asked = prompt(length, seed=90) + prompt(5 if wave else 0, seed=91)
            reference(model_folder(model)).assert_greedy(asked, ids)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.needs(TINY_MODELS[name].capability)) for name in MODELS]
)
def test_all_processes_answer_as_one_engine(stage: str, model: str, device: str) -> None:
    """Main, router or controller, detokenizer and two ranks, of which the controller is one: cold, warm, together."""
    folder = model_folder(model)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    engine = engine_maker(stage, device="cpu")(model)
    prompts = [prompt(length, seed=80) for length in (1, 6, 40, 100)]
    expected = [tokenizer.decode(solo(engine, ids, greedy(24)).ids) for ids in prompts]
    with ServerDriver(stage, folder, ["--device", device, *TWO_RANKS, *POOL]) as server:
        assert set(server.pids()) == set(DIALECTS[stage].roles_at(2))
        for _ in range(2):
            answers = generate(server, input_ids=prompts, sampling_params=greedy(24))
            assert [answer["text"] for answer in answers] == expected
        assert generate(server, input_ids=prompts[2], sampling_params=greedy(24))["text"] == expected[2]
        assert internal_state(server)["cached_tokens"] > 100
        wait_idle(server)


@pytest.fixture
def server(servers: ServerFactory, stage: str) -> ServerDriver:
    """One server of two ranks for the tests below; its pool is tight, so that it has to retract."""
    return servers(stage, "llama", *TWO_RANKS, "--max-total-tokens", "300")


@pytest.mark.slow
def test_retraction_abort_stop_strings_seeds_flush(server: ServerDriver) -> None:
    """What one rank's server does, two ranks do too; a probe's canary shows that the ranks stay together."""
    with probe(server):  # which flushes, too
        before = internal_state(server)["retractions"]
        prompts = [prompt(10, seed=81 + number) for number in range(6)]
        together = generate(server, input_ids=prompts, sampling_params=greedy(100))
        assert internal_state(server)["retractions"] > before
        for ids, answer in zip(prompts, together, strict=True):
            assert answer["text"] == generate(server, input_ids=ids, sampling_params=greedy(100))["text"]

    with probe(server):
        leave_after(server, 0.3, {"text": "count", "sampling_params": greedy(250), "stream": True})
        wait_idle(server)

    with probe(server):
        text = together[0]["text"]
        stopped = generate(server, input_ids=prompts[0], sampling_params=greedy(100, stop=text[20:22]))
        assert stopped["text"] == text[: text.index(text[20:22])]
        assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": text[20:22]}
        chunks = stream(server, "/generate", {"input_ids": prompts[0], "sampling_params": greedy(100)})
        assert chunks[-1]["text"] == text

    with probe(server):
        drawn = {"temperature": 1.0, "max_new_tokens": 30, "ignore_eos": True}
        bodies: list[dict[str, Any]] = [
            {"input_ids": prompts[1], "sampling_params": {**drawn, "seed": seed}} for seed in range(5)
        ]
        alone = [generate(server, **body)["text"] for body in bodies]
        assert len(set(alone)) == 5
        again = generate(
            server, input_ids=[prompts[1]] * 5, sampling_params=[body["sampling_params"] for body in bodies]
        )
        assert [answer["text"] for answer in again] == alone
        for _ in range(4):  # unseeded
            generate(server, input_ids=[prompts[2]] * 3, sampling_params=drawn)


@pytest.mark.slow
def test_nothing_listens_beyond_the_loopback(server: ServerDriver) -> None:
    for pid in server.all_pids():
        for connection in psutil.Process(pid).net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip == "127.0.0.1", connection


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "role", "busy"), KILLS, scope="function")
def test_sigkill(stage: str, role: str, busy: bool) -> None:
    """INV-LIVE: whichever of them is killed, in a step or idle, all are gone within 5 s."""
    with ServerDriver(stage, model_folder("llama"), ["--device", "cpu", *TWO_RANKS]) as server:
        pids = server.all_pids()
        folders = socket_folders(pids)
        assert folders
        pending = Pending(server) if busy else None
        killed_at = time.monotonic()
        server.kill(role, signal.SIGKILL)
        if pending is not None:
            pending.join(LIMIT_S)
        left = server.wait_gone(pids, LIMIT_S - (time.monotonic() - killed_at))
        assert left == [], "INV-LIVE: orphans"
        assert not any(folder.exists() for folder in folders), "the sockets' folder is left behind"
        if role != "main":
            assert server.process.wait(1) == 1
            assert f"the {role} process was killed by SIGKILL" in server.log()
        if role.startswith("rank") and pending is not None:
            whole = pending.ends["whole"]
            assert isinstance(whole, httpx.TransportError) or whole.status_code == 503


@pytest.mark.slow
def test_a_polite_signal_ends_it_cleanly(stage: str) -> None:
    with ServerDriver(stage, model_folder("llama"), ["--device", "cpu", *TWO_RANKS]) as server:
        pids = server.all_pids()
        pending = Pending(server)
        server.process.send_signal(signal.SIGTERM)
        pending.join(LIMIT_S)
        assert server.wait_gone(pids, LIMIT_S) == []
        assert server.process.wait(1) == 0
        assert "Traceback" not in server.log()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp-size", "3"], "--tp-size 3 must divide the model's num_attention_heads (4)"),
        (["--tp-size", "8"], "--tp-size 8 must divide the model's num_attention_heads (4)"),
        (["--tp-size", "0"], "--tp-size must be at least 1"),
        (["--device", "cuda", "--tp-size", "2"], "no CUDA device"),
    ],
)
def test_what_can_not_be_is_one_clear_line(stage: str, flags: list[str], words: str) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    driver = ServerDriver(stage, model_folder("llama"), ["--device", "cpu", *flags], env=hidden)
    with pytest.raises(ServerError) as error:
        driver.start()
    lines = [line for line in str(error.value).splitlines() if words in line]
    assert len(lines) == 1 and "Traceback" not in str(error.value), str(error.value)
