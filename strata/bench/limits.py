"""The physical limit of decoding: every step reads every weight once, so memory bandwidth bounds it."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from typing import Any

from .setup import BenchSetup

COPY_BYTES = {"cpu": 2**28, "cuda": 2**31}
COPY_ROUNDS = 7


@dataclass(frozen=True)
class Limits:
    """``copy_gb_s`` counts bytes read plus bytes written; ``weight_gb`` is what one decode step must read."""

    copy_gb_s: float
    weight_gb: float

    @property
    def steps_per_s(self) -> float:
        return self.copy_gb_s / self.weight_gb

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "steps_per_s": self.steps_per_s}


def measure_limits(setup: BenchSetup) -> Limits | None:
    """Both sides of the limit; None where the model folder holds no weights to count."""
    elements = _weight_elements(setup)
    if not elements:
        return None
    import torch

    size = torch.empty(0, dtype=getattr(torch, setup.dtype)).element_size()
    return Limits(copy_gb_s(setup.device), elements * size / 1e9)


def copy_gb_s(device: str) -> float:
    import torch

    count = COPY_BYTES[device]
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    best = math.inf
    for _ in range(COPY_ROUNDS):
        started = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * count / best / 1e9


def _weight_elements(setup: BenchSetup) -> int:
    """Elements of all tensors in the folder's safetensors files, read from their headers."""
    total = 0
    for path in setup.model_path.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        total += sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")
    return total
