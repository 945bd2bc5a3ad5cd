"""Data parallelism: replicas behind one controller. Who gets a request, what is asked of all, how they end."""

from __future__ import annotations

import contextlib
import importlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from tokenizers import Tokenizer

from strata.adapters import DIALECTS, ServerDriver

from .driving import greedy, prompt, solo
from .fixtures import EngineFactory, ServerFactory, model_folder
from .speaking import generate, internal_state, probe, wait_idle
from .test_abort import LONG, connected, wait_until
from .test_live import LIMIT_S, Pending, socket_folders

pytestmark = pytest.mark.needs("parallel.data")

TWO_REPLICAS = ("--dp-size", "2", "--max-total-tokens", "2048")


@pytest.fixture
def server(servers: ServerFactory, stage: str) -> ServerDriver:
    """Two replicas that take turns."""
    return servers(stage, "llama", *TWO_REPLICAS)


@pytest.fixture
def balanced(servers: ServerFactory, stage: str) -> ServerDriver:
    """Two replicas, of which the less busy one gets a request."""
    return servers(stage, "llama", *TWO_REPLICAS, "--load-balance-method", "shortest_queue")


def of_each(server: ServerDriver, name: str) -> list[Any]:
    return [replica[name] for replica in internal_state(server)["replicas"]]


def ask(server: ServerDriver, number: int) -> None:
    for seed in range(number):
        generate(server, input_ids=prompt(8, seed), sampling_params=greedy(2))


@contextlib.contextmanager
def served(server: ServerDriver) -> Iterator[list[int]]:
    """How many requests each replica has served within the block, known when it is left."""
    counts: list[int] = []
    before = of_each(server, "requests_served")
    yield counts
    counts += [after - then for after, then in zip(of_each(server, "requests_served"), before, strict=True)]


@pytest.mark.slow
def test_its_processes(server: ServerDriver, stage: str) -> None:
    assert set(server.pids()) == {*DIALECTS[stage].roles, "replica 0", "replica 1"}


@pytest.mark.slow
def test_round_robin_takes_turns(server: ServerDriver) -> None:
    """Whatever is going on: one replica is busy all the time, and still gets every second request."""
    with served(server) as counts:
        ask(server, 6)
    assert counts == [3, 3]
    with served(server) as counts, connected(server, {"text": "count", "sampling_params": LONG}):
        wait_until(lambda: sum(of_each(server, "running")) == 1)
        ask(server, 7)
    assert sorted(counts) == [3, 4]
    wait_idle(server)


@pytest.mark.slow
def test_shortest_queue_spares_the_busy(balanced: ServerDriver) -> None:
    """As long as one replica has a request in flight the idle one gets the others; waiting ones count, too."""
    with served(balanced) as counts, connected(balanced, {"text": "count", "sampling_params": LONG}):
        wait_until(lambda: sum(of_each(balanced, "running")) == 1)
        busy = of_each(balanced, "running").index(1)
        ask(balanced, 5)
        assert of_each(balanced, "requests_in_flight")[busy] == 1
    assert counts[1 - busy] == 5 and counts[busy] == 0
    wait_idle(balanced)
    with connected(balanced, {"input_ids": [prompt(5, seed) for seed in range(6)], "sampling_params": LONG}):
        wait_until(lambda: sum(of_each(balanced, "requests_in_flight")) == 6)
        assert of_each(balanced, "requests_in_flight") == [3, 3]
    wait_idle(balanced)
    assert of_each(balanced, "requests_in_flight") == [0, 0]


@pytest.mark.slow
def test_every_replica_answers_as_one_engine(
    server: ServerDriver, engines: EngineFactory, stage: str
) -> None:
    """Cold and warm on each; what one has cached the other has not."""
    tokenizer = Tokenizer.from_file(str(model_folder("llama") / "tokenizer.json"))
    prompts = [prompt(length, seed=70) for length in (1, 6, 40, 100)]
    expected = [tokenizer.decode(solo(engines(stage), ids, greedy(24)).ids) for ids in prompts]
    with probe(server):
        for ids, text in zip(prompts, expected, strict=True):
            answers = [generate(server, input_ids=ids, sampling_params=greedy(24)) for _ in range(4)]
            assert [answer["text"] for answer in answers] == [text] * 4
            cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
            assert cached[0] == cached[1] <= 1 and cached[2] == cached[3] == len(ids) - 1
        together = generate(server, input_ids=prompts, sampling_params=greedy(24))
        assert [answer["text"] for answer in together] == expected


@pytest.mark.slow
def test_draws_do_not_depend_on_the_replica(server: ServerDriver) -> None:
    """Equal seeds draw the same everywhere; without a seed replicas do not draw in step."""
    drawn = {"temperature": 1.5, "max_new_tokens": 40, "ignore_eos": True}
    ids = prompt(9, seed=71)
    with probe(server):
        seeded = generate(server, input_ids=[ids] * 4, sampling_params={**drawn, "seed": 3})
        assert len({answer["text"] for answer in seeded}) == 1
        unseeded = generate(server, input_ids=[ids] * 4, sampling_params=drawn)
        assert len({answer["text"] for answer in unseeded}) == 4


@pytest.mark.slow
def test_flush_is_for_all_or_none(server: ServerDriver) -> None:
    with probe(server):
        ask(server, 4)
        before = of_each(server, "evictable")
        assert min(before) > 0
        with connected(server, {"text": "count", "sampling_params": LONG}):
            wait_until(lambda: sum(of_each(server, "running")) == 1)
            response = server.client.post("/flush_cache")
            assert response.status_code == 400 and "waiting or running" in response.text
            idle = of_each(server, "running").index(0)
            assert of_each(server, "evictable")[idle] == before[idle]
        wait_idle(server)
        assert server.client.post("/flush_cache").status_code == 200
        assert of_each(server, "free") == of_each(server, "size")


@pytest.mark.slow
def test_an_abort_reaches_its_replica(server: ServerDriver) -> None:
    """One long request on each; each client that goes frees the replica that worked for it, and no other."""
    with probe(server):
        with connected(server, {"text": "one", "sampling_params": LONG}):
            with connected(server, {"text": "two", "sampling_params": LONG, "stream": True}):
                wait_until(lambda: of_each(server, "running") == [1, 1])
            wait_until(lambda: sum(of_each(server, "running")) == 1)
            assert sum(of_each(server, "requests_in_flight")) == 1
        wait_idle(server)
        for replica in internal_state(server)["replicas"]:
            assert replica["free"] + replica["evictable"] == replica["size"], "INV-FREE"


@pytest.mark.slow
def test_the_state_adds_up(server: ServerDriver) -> None:
    ask(server, 2)
    state = internal_state(server)
    for name in ("size", "free", "evictable", "forward_steps", "prefill_tokens", "generated_tokens"):
        assert state[name] == sum(replica[name] for replica in state["replicas"]), name
    assert state["size"] == 2 * 2048
    assert 0 < state["new_token_ratio"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("role", ["replica 1", "main"])
def test_sigkill(stage: str, role: str) -> None:
    """INV-LIVE: whichever dies, all are gone within 5 s, and nobody waits for an answer that can't come."""
    with ServerDriver(stage, model_folder("llama"), ["--device", "cpu", *TWO_REPLICAS]) as server:
        pids = server.all_pids()
        folders = socket_folders(pids)
        pending = Pending(server)
        killed_at = time.monotonic()
        server.kill(role, signal.SIGKILL)
        pending.join(LIMIT_S)
        whole = pending.ends["whole"]
        assert isinstance(whole, httpx.TransportError) or whole.status_code == 503
        left = server.wait_gone(pids, LIMIT_S - (time.monotonic() - killed_at))
        assert left == [], "INV-LIVE: orphans"
        assert not any(folder.exists() for folder in folders), "the sockets' folder is left behind"
        if role != "main":
            assert server.process.wait(1) == 1
            assert f"the {role} process was killed by SIGKILL" in server.log()


@pytest.mark.slow
def test_replicas_of_two_ranks(stage: str, engines: EngineFactory) -> None:
    """Both kinds of parallelism: every replica is warmed up, all say the same, and one rank's death ends all."""
    ids = prompt(40, seed=72)
    tokenizer = Tokenizer.from_file(str(model_folder("llama") / "tokenizer.json"))
    expected = tokenizer.decode(solo(engines(stage), ids, greedy(24)).ids)
    flags = ["--device", "cpu", *TWO_REPLICAS, "--tp-size", "2"]
    with ServerDriver(stage, model_folder("llama"), flags) as server:
        assert of_each(server, "generated_tokens") == [DIALECTS[stage].warm_up_tokens] * 2
        with served(server) as counts:
            answers = generate(server, input_ids=[ids] * 4, sampling_params=greedy(24))
        assert [answer["text"] for answer in answers] == [expected] * 4
        assert counts == [2, 2]
        pids = server.all_pids()
        newest = max((psutil.Process(pid) for pid in pids), key=lambda process: process.create_time())
        assert newest.pid not in server.pids().values(), "a rank of a replica"
        newest.kill()
        assert server.wait_gone(pids, LIMIT_S) == [], "INV-LIVE: orphans"
        assert server.process.wait(1) == 1
        assert "Traceback" not in server.log()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dp_size": 0}, "--dp-size must be at least 1"),
        (
            {"dp_size": 2, "nnodes": 2, "node_rank": 0, "tp_size": 2, "nccl_init_addr": "h:1"},
            "--dp-size 2 can't",
        ),
    ],
)
def test_what_can_not_be_is_said(stage: str, fields: dict[str, Any], words: str) -> None:
    arguments = importlib.import_module(f"{DIALECTS[stage].package}.server_args")
    with pytest.raises(ValueError, match=words):
        arguments.ServerArgs(model_path="folder", **fields).check()
