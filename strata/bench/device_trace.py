"""How long the device works in one step, and in how many launches: a trace of a few steps, taken apart.

An eager step's kernels wait for their launches, so no event around them can tell work from waiting. The
profiler times each kernel by itself; what a step takes beyond their sum is the *host gap*.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
NAME_LENGTH = 120

DECODE_LAYER_LAUNCHES = (
    "add and RMSNorm",
    "QKV product",
    "rotate and store K, V",
    "decode attention",
    "merge of its splits (long contexts, small batches)",
    "output product",
    "add and RMSNorm",
    "gate-up product",
    "SiLU and multiply",
    "down product",
)
"""What a decoder layer should launch in a decode step; cuBLAS adds a sum where it splits a product."""


@dataclass(frozen=True)
class DeviceTrace:
    """Of one step, on average: seconds the device worked, its launches, and both by kernel, longest first."""

    seconds: float
    launches: float
    kernels: dict[str, tuple[float, float]]
    """Kernel name → (launches, microseconds)."""

    def launches_per_layer(self, layers: int) -> int:
        """Launches that each of ``layers`` layers makes; those outside of the layers are fewer of a kind."""
        return sum(int(launches // layers) for launches, _ in self.kernels.values())


def trace_steps(step: Callable[[], object], count: int) -> DeviceTrace | None:
    """Run ``step`` ``count`` times under the profiler; the steps are slower for it, their kernels are not.

    None where the profiler sees no kernels: some virtual machines keep it from them.
    """
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)
    torch.cuda.synchronize()
    profile.start()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    profile.stop()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        return summarize(json.loads(file.read_text())["traceEvents"], count)


def summarize(events: list[dict[str, Any]], steps: int) -> DeviceTrace | None:
    """``events`` of a Chrome trace that covers ``steps`` equal steps, per step; None if none is the device's."""
    work = [event for event in events if event.get("cat") in DEVICE_WORK]
    if not work:
        return None
    totals: dict[str, tuple[float, float]] = {}
    for event in work:
        launches, microseconds = totals.get(event["name"][:NAME_LENGTH], (0.0, 0.0))
        totals[event["name"][:NAME_LENGTH]] = (launches + 1 / steps, microseconds + event["dur"] / steps)
    kernels = dict(sorted(totals.items(), key=lambda item: -item[1][1]))
    seconds = sum(event["dur"] for event in work) / steps / 1e6
    return DeviceTrace(seconds, len(work) / steps, kernels)
