"""Timing on a CUDA device, and the two ceilings that results are compared with.

Device time comes from replays of a captured graph, so that launches cost nothing; host time is what eager
launches take before the device has done anything.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


def device_seconds(calls: Sequence[Call], budget_s: float = 0.15) -> float:
    """Median device time of one call. The calls run in turn in one graph: over more data than the L2 holds,
    each finds its own gone when its turn comes again."""
    for call in calls:
        call()  # compiles what there is to compile, outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    one = _event_seconds(graph.replay)
    replays = [_event_seconds(graph.replay) for _ in range(min(50, max(5, int(budget_s / max(one, 1e-6)))))]
    del graph
    gc.collect()
    return statistics.median(replays) / len(calls)


def _event_seconds(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _median_event_seconds(call: Call, repeats: int = 10) -> float:
    """Device time of an eager call so long that its launch does not count."""
    call()
    return statistics.median(_event_seconds(call) for _ in range(repeats))


def host_seconds(call: Call, repeats: int = 200) -> float:
    """Host time of one eager call, median of batches so short that the device's queue never fills."""
    for _ in range(10):
        call()
    batches = []
    for _ in range(repeats // 20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(20):
            call()
        batches.append((time.perf_counter() - begin) / 20)
    torch.cuda.synchronize()
    return statistics.median(batches)


def copy_bandwidth(size: int = 2**32) -> float:
    """Bytes per second of a device-to-device copy of ``size`` bytes, counting those read and those written."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    # Not in a graph: there the copy becomes a memcpy node, which reaches two thirds of what a kernel does.
    return 2 * size / _median_event_seconds(lambda: target.copy_(source))


def matmul_rate(n: int = 8192) -> float:
    """Floating-point operations per second of a bf16 product of random ``n * n`` matrices."""
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / device_seconds([lambda: torch.mm(a, b, out=out)])
