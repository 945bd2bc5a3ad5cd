"""When requests are sent: all at once or as they would arrive by chance, and how many at most at a time."""

from __future__ import annotations

import asyncio
import math
import random
import resource
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from .datasets import BenchRequest
from .metrics import RequestResult

OPEN_FILES = 10_000
"""More is refused on some systems, whatever they call their limit."""


@dataclass
class LoadRun:
    """What a run has come to; after an interruption, what had been answered by then."""

    results: list[RequestResult] = field(default_factory=list)
    duration: float = 0.0
    """Seconds from the first request to the latest answer."""
    interrupted: bool = False


def arrival_times(rng: random.Random, count: int, request_rate: float) -> list[float]:
    """Seconds from the start at which each request is sent: a Poisson process, or for an infinite rate all 0."""
    if math.isinf(request_rate):
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(request_rate)
    return times


def raise_open_files_limit() -> None:
    """Let this process have more connections, if the system allows: each request under way takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def run_load(
    send: Callable[[BenchRequest], Awaitable[RequestResult]],
    requests: Sequence[BenchRequest],
    times: Sequence[float],
    max_concurrency: int | None,
    on_result: Callable[[RequestResult], None],
) -> LoadRun:
    """Send every request at its time, with ``max_concurrency`` under way at most; Ctrl-C ends it early.

    A request's clock starts when it is sent, not while it waits for its turn.
    """
    run = LoadRun()
    turns = asyncio.Semaphore(max_concurrency or max(1, len(requests)))
    started = time.perf_counter()

    async def one(request: BenchRequest, at: float) -> None:
        await asyncio.sleep(started + at - time.perf_counter())
        async with turns:
            result = await send(request)
        run.results.append(result)
        run.duration = time.perf_counter() - started
        on_result(result)

    tasks = [asyncio.ensure_future(one(*pair)) for pair in zip(requests, times, strict=True)]

    def interrupt() -> None:
        run.interrupted = True
        for task in tasks:
            task.cancel()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    for outcome in outcomes:
        if outcome is not None and not isinstance(outcome, asyncio.CancelledError):
            raise outcome
    return run
