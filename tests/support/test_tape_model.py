"""Tapes of the real model: a decode step of genesis replayed bit by bit like a plain run, and how fast."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest
import torch

from stages.v0_1_genesis.managers.router.model_runner import ModelRunner
from stages.v0_1_genesis.support.graph_tape import Graph, make_graph, make_pool
from stages.v0_1_genesis.support.tape.program import same_bits
from strata.model_zoo import fetch
from tests.models.tiny import tiny_llama

from .decode import StaticDecode, model_runner

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["llama", "llama-gqa3", "llama-rope3"])
def runner(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    torch.manual_seed(0)
    yield model_runner(tiny_llama(request.param))


def assert_replays_like_a_plain_run(
    step: StaticDecode, graph: Graph, logits: torch.Tensor, max_len: int = 24
) -> None:
    """On new inputs: same logits, and the same K and V in the pool."""
    step.fill(max_len)
    before = step.pool_snapshot()
    expected = step.run().next_token_logits
    written = step.pool_snapshot()
    step.restore(before)
    graph.replay()
    assert same_bits(logits, expected)
    assert all(map(same_bits, step.pool_snapshot(), written))
    assert not all(map(same_bits, before, written))


def test_replays_are_plain_runs_at_every_size(runner: ModelRunner) -> None:
    pool = make_pool(CPU)
    captured = []
    for bs in (1, 3, 5, 8):
        step, graph = StaticDecode(runner, bs), make_graph(CPU, pool)
        captured.append((step, graph, graph.capture(step.run, step.fill).next_token_logits))
    for step, graph, logits in captured * 2:
        for _ in range(3):
            assert_replays_like_a_plain_run(step, graph, logits)


def test_the_plan_may_grow_and_shrink_between_replays(runner: ModelRunner) -> None:
    """So that a step costs what its requests need, not what the longest possible ones would."""
    step, graph = StaticDecode(runner, bs=3), make_graph(CPU, make_pool(CPU))
    logits = graph.capture(step.run, step.fill).next_token_logits
    for max_len in (1, 70, 8, 33):
        assert_replays_like_a_plain_run(step, graph, logits, max_len)


def test_bfloat16() -> None:
    torch.manual_seed(0)
    step = StaticDecode(model_runner(tiny_llama("llama"), dtype="bfloat16"), bs=3)
    graph = make_graph(CPU, make_pool(CPU))
    logits = graph.capture(step.run, step.fill).next_token_logits
    assert_replays_like_a_plain_run(step, graph, logits)


def test_padding_changes_nothing_for_the_others(runner: ModelRunner) -> None:
    """Five requests in a graph of eight: as in a plain run of five, and nothing written but to slot 0."""
    padded, real = StaticDecode(runner, bs=8), StaticDecode(runner, bs=5)
    graph = make_graph(CPU, make_pool(CPU))
    logits = graph.capture(padded.run, padded.fill).next_token_logits
    rows, seq_lens = torch.arange(10, 15), torch.tensor([3, 1, 20, 7, 12])
    for step in (padded, real):
        step.set(torch.arange(5), rows, seq_lens)
    expected = real.run().next_token_logits
    padded.input_ids[5:] = 7
    before = padded.pool_snapshot()
    graph.replay()
    torch.testing.assert_close(logits[:5], expected, atol=5e-4, rtol=0)
    for old, new in zip(before, padded.pool_snapshot(), strict=True):
        torch.testing.assert_close(new[1:], old[1:], atol=5e-4, rtol=0)
        assert not torch.equal(new[0], old[0])


# -- SmolLM2 ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("bs", [1, 8])
def test_smollm2(bs: int, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    step = StaticDecode(model_runner(fetch()), bs)
    step.run()
    started = time.perf_counter()
    graph = make_graph(CPU, make_pool(CPU))
    logits = graph.capture(step.run, step.fill).next_token_logits
    seconds = time.perf_counter() - started
    assert_replays_like_a_plain_run(step, graph, logits, max_len=128)
    plain, replayed = compare_speed(step.run, graph.replay, int(os.environ.get("TAPE_ROUNDS", "10")))
    with capsys.disabled():
        print(
            f"\nSmolLM2, batch {bs}: captured in {seconds:.2f} s; "
            f"plain {plain:.2f} ms, tape {replayed:.2f} ms, ratio {replayed / plain:.3f}"
        )


def compare_speed(plain: Callable[[], Any], replay: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Median milliseconds of each, taken in turns."""
    times: tuple[list[float], list[float]] = [], []
    for _ in range(rounds):
        for function, mine in zip((plain, replay), times, strict=True):
            start = time.perf_counter()
            function()
            mine.append((time.perf_counter() - start) * 1e3)
    return median(times[0]), median(times[1])
