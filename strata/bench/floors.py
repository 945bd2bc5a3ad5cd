"""What physics allows: the least time of a decode step, a prefill, and the whole mix, from two measured rates.

Decoding must read every weight and every cached K and V once; a prefill must multiply each token with every
weight. Neither counts what could overlap or what is done besides, so no engine reaches them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from .gpu_timing import copy_bandwidth, matmul_rate
from .limits import copy_gb_s
from .requests import BenchRequest
from .shapes import Shape

CPU_MATMUL_SIZE = 1024


@dataclass(frozen=True)
class Ceilings:
    """Measured on the device of a run: a large copy, bytes read plus written, and a large matrix product."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float


def measure_ceilings(device: str) -> Ceilings:
    """On CUDA the product is in bfloat16, on the CPU in float32, as the engines compute there."""
    if device == "cuda":
        return Ceilings(copy_bandwidth(), matmul_rate())
    return Ceilings(copy_gb_s(device) * 1e9, _cpu_matmul_rate())


def _cpu_matmul_rate() -> float:
    a, b = (torch.randn(CPU_MATMUL_SIZE, CPU_MATMUL_SIZE) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * CPU_MATMUL_SIZE**3 / min(_seconds(lambda: torch.mm(a, b, out=out)) for _ in range(5))


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@dataclass(frozen=True)
class Floors:
    """Least seconds for a model of ``shape`` whose elements have ``itemsize`` bytes."""

    shape: Shape
    itemsize: int
    ceilings: Ceilings

    def decode_step(self, seq_lens: Iterable[int]) -> float:
        """One step that attends to ``seq_lens`` tokens of each request."""
        elements = self.shape.step_weights + self.shape.cached_per_token * sum(seq_lens)
        return elements * self.itemsize / self.ceilings.copy_bytes_per_s

    def prefill(self, tokens: int) -> float:
        return 2 * self.shape.step_weights * tokens / self.ceilings.matmul_flops_per_s

    def serve(self, requests: Sequence[BenchRequest], max_running: int) -> float:
        """All of ``requests`` with at most ``max_running`` at once: one prefill, then as few steps as can be."""
        new_tokens = [request.new_tokens for request in requests]
        steps = (
            max(max(new_tokens), -(-sum(new_tokens) // max_running)) - 1
        )  # a prefill gives the first token
        cached = sum(
            (request.new_tokens - 1) * len(request.ids) + request.new_tokens * (request.new_tokens - 1) // 2
            for request in requests
        )
        weights = self.decode_step(()) * steps
        attention = self.decode_step((cached,)) - self.decode_step(())
        return self.prefill(sum(len(request.ids) for request in requests)) + weights + attention
