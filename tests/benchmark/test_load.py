"""When requests are sent, and how many at a time."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics

import pytest

from stages.v0_2_cudagraph.benchmark.datasets import BenchRequest
from stages.v0_2_cudagraph.benchmark.load import LoadRun, arrival_times, run_load
from stages.v0_2_cudagraph.benchmark.metrics import RequestResult


def numbered(count: int) -> list[BenchRequest]:
    return [BenchRequest([number], 1) for number in range(count)]


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(random.Random(0), 4, math.inf) == [0.0] * 4


def test_a_rate_is_kept_on_average_and_by_chance() -> None:
    times = arrival_times(random.Random(0), 20_001, 50.0)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0.0 and min(gaps) >= 0.0
    assert statistics.fmean(gaps) == pytest.approx(0.02, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.05), "exponential: as wide as its mean"
    assert times == arrival_times(random.Random(0), 20_001, 50.0)


@pytest.mark.parametrize("most", [1, 3, None])
def test_no_more_than_the_limit_are_under_way(most: int | None) -> None:
    under_way, seen, order = 0, 0, list[int]()

    async def send(request: BenchRequest) -> RequestResult:
        nonlocal under_way, seen
        under_way += 1
        seen = max(seen, under_way)
        order.append(request.prompt_ids[0])
        await asyncio.sleep(0.001)
        under_way -= 1
        return RequestResult(1)

    results = list[RequestResult]()
    run = asyncio.run(run_load(send, numbered(10), [0.0] * 10, most, results.append))
    assert seen == (most or 10)
    assert order == list(range(10)), "first come, first served"
    assert run.results == results and len(results) == 10 and not run.interrupted


def test_requests_wait_for_their_time() -> None:
    order = list[int]()

    async def send(request: BenchRequest) -> RequestResult:
        order.append(request.prompt_ids[0])
        return RequestResult(1)

    run = asyncio.run(run_load(send, numbered(3), [0.1, 0.05, 0.0], None, lambda result: None))
    assert order == [2, 1, 0]
    assert run.duration >= 0.1


def test_a_bug_in_the_client_is_no_result() -> None:
    async def send(request: BenchRequest) -> RequestResult:
        raise ZeroDivisionError

    async def run() -> LoadRun:
        return await run_load(send, numbered(2), [0.0] * 2, None, lambda result: None)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(run())
