"""Where a step's time goes: schedule, prepare, forward, sample, emit.

Owned by the class that owns the step. Benches read it; a server leaves it off, and then it costs a
comparison a phase.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("schedule", "prepare", "forward", "sample", "emit")


class StepTimer:
    """Adds up seconds per phase. ``synchronize`` makes each phase wait for the device, so that the
    forward phase holds the device's time and the others only the host's: the *host gap*."""

    def __init__(self) -> None:
        self.enabled = False
        self.synchronize = False
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self.enabled:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.synchronize and torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds[name] += time.perf_counter() - start

    def reset(self) -> None:
        self.seconds.clear()
