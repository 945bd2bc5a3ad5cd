"""Kernel microbench: ``python -m strata.bench.kernels [--json PATH] [--sweep] [--no-flashinfer]``.

On one CUDA device, at Llama-3.1-8B's shape (32 query and 8 KV heads of 128, bf16): decode attention of the
Triton and the FlashInfer path as a share of the copy bandwidth measured in the same run, prefill attention as
a share of the measured matmul rate, the fused elementwise kernels, and what their launches cost the host.
``--sweep`` tries several tile shapes per Triton kernel and names the fastest.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stages.v0_1_genesis.layers.flash_attention import Blocks
from stages.v0_1_genesis.layers.fused_activation import silu_and_mul
from stages.v0_1_genesis.layers.fused_layernorm import fused_add_rmsnorm
from stages.v0_1_genesis.layers.fused_rotary import rotate_and_store
from stages.v0_1_genesis.layers.get_selected_logprob import get_selected_logprob
from stages.v0_1_genesis.layers.store_kv import store_kv
from stages.v0_1_genesis.layers.token_attention import DecodeBlocks

from .attention_cases import Case, DecodeCase, PrefillCase, arange, randn
from .gpu_timing import Call, copy_bandwidth, device_seconds, host_seconds, matmul_rate
from .report import provenance

SEED = 0
# (requests, tokens in the pool) and (requests, cached tokens, new tokens), each per request
DECODE_CASES = [(32, 1024), (32, 8192), (128, 1024), (1, 1024), (1, 8192)]
PREFILL_CASES = [
    (8, 0, 1024),
    (1, 0, 8192),
    (8, 1024, 512),
    (32, 2048, 16),
]
DECODE_SWEEP = [
    DecodeBlocks(64, 4, 3, 4, 256),
    DecodeBlocks(64, 4, 3, 8, 256),
    DecodeBlocks(64, 4, 5, 3, 256),
    DecodeBlocks(64, 4, 5, 6, 256),
    DecodeBlocks(32, 4, 7, 4, 256),
    DecodeBlocks(32, 2, 5, 8, 256),
    DecodeBlocks(128, 4, 3, 3, 256),
    DecodeBlocks(128, 8, 3, 3, 256),
    DecodeBlocks(64, 4, 3, 4, 64),
]
PREFILL_SWEEP = [
    Blocks(128, 64, 8, 3),
    Blocks(128, 64, 4, 3),
    Blocks(128, 128, 8, 2),
    Blocks(128, 128, 8, 3),
    Blocks(64, 64, 4, 3),
    Blocks(128, 64, 8, 5),
    Blocks(64, 64, 4, 2),
    Blocks(32, 64, 4, 3),
    Blocks(16, 64, 4, 3),
]


@dataclass
class Row:
    """One measurement: ``rate`` is in TB/s or TFLOP/s, ``share`` is of the ceiling measured in this run."""

    kernel: str
    case: str
    path: str
    microseconds: float
    rate: float
    share: float
    error: float | None = None


class Bench:
    """The ceilings of this run, and the rows measured so far."""

    def __init__(self) -> None:
        self.bandwidth, self.matmul = copy_bandwidth(), matmul_rate()
        self.rows: list[Row] = []
        print(f"copy {self.bandwidth / 1e12:.2f} TB/s, matmul {self.matmul / 1e12:.0f} TFLOP/s", flush=True)

    def measure(
        self,
        kernel: str,
        case: str,
        path: str,
        calls: Callable[[], list[Call]],
        work: float,
        ceiling: float,
        error: Callable[[], float] | None = None,
    ) -> None:
        """Adds a row; a path that can't run (a missing package, too little shared memory) is said, not fatal."""
        try:
            seconds = device_seconds(calls())
            seen = error() if error else None
        except Exception as problem:
            reason = str(problem).strip().splitlines() or [""]
            print(f"  {kernel} {case} {path}: {type(problem).__name__}: {reason[0][:150]}", flush=True)
            return
        row = Row(kernel, case, path, seconds * 1e6, work / seconds / 1e12, work / seconds / ceiling, seen)
        self.rows.append(row)
        print(f"  {kernel} {case} {path}: {row.microseconds:.1f} us, {row.share:.0%}", flush=True)

    def attention(self, case: Case, candidates: Sequence[Any], flashinfer: bool) -> None:
        """One row per path over the same tensors, and per candidate tile shape."""
        ceiling = self.bandwidth if case.memory_bound else self.matmul
        paths: list[tuple[str, Callable[[], list[Call]]]] = [("triton", case.triton)]
        if flashinfer:
            paths.append(("flashinfer", case.flashinfer))
        paths += [("/".join(map(str, blocks)), partial(case.triton, blocks)) for blocks in candidates]
        for path, calls in paths:
            case.o.fill_(float("nan"))
            self.measure(case.kernel, case.name, path, calls, case.work, ceiling, case.error)

    def elementwise(self, tokens: int = 8192) -> None:
        """The fused kernels at a large batch, where only bytes count."""
        for name, call, moved in elementwise_calls(tokens):
            self.measure(name, f"{tokens} tokens", "triton", partial(list, (call,)), moved, self.bandwidth)


def elementwise_calls(tokens: int) -> list[tuple[str, Call, float]]:
    """(name, call, bytes moved) of each fused kernel; logprobs take at most 1,024 rows."""
    x, residual, weight = randn(tokens, 4096), randn(tokens, 4096), randn(4096)
    gate_up, qkv = randn(tokens, 28672), randn(tokens, 6144)
    q, k, v = qkv.view(tokens, 48, 128).split((32, 8, 8), dim=1)
    table, positions = randn(tokens, 128), arange(tokens)
    pool = randn(2, 2 * tokens, 8, 128)
    slots = torch.randperm(2 * tokens, device="cuda")[:tokens].to(torch.int32)
    rows = min(tokens, 1024)
    logits = randn(rows, 128256)
    next_ids = torch.randint(0, 128256, (rows,), device="cuda")
    row = 2.0 * tokens
    return [
        ("add_rmsnorm", lambda: fused_add_rmsnorm(x, residual, weight, 1e-5), row * 4 * 4096),
        ("silu_and_mul", lambda: silu_and_mul(gate_up), row * 3 * 14336),
        (
            "rotate_and_store",
            lambda: rotate_and_store(q, k, v, table, positions, pool[0], pool[1], slots),
            row * (2 * 5120 + 3 * 1024 + 128),
        ),
        ("store_kv", lambda: store_kv(k, v, pool[0], pool[1], slots), row * 4 * 1024),
        ("logprob", lambda: get_selected_logprob(logits, next_ids), 2.0 * rows * 128256),
    ]


def launch_costs() -> dict[str, float]:
    """Host microseconds of one eager call at a decode step's size, beside torch's own ops."""
    case = DecodeCase(32, 64)
    longer = DecodeCase(32, 1024)
    a, b, w = randn(32, 4096), randn(32, 4096), randn(4096, 4096)
    calls: dict[str, Call] = {name: call for name, call, _ in elementwise_calls(32)}
    calls["decode, one stage"] = case.triton()[0]
    calls["decode, two stages"] = longer.triton()[0]
    calls["torch add"] = lambda: a + b
    calls["torch matmul"] = lambda: a @ w
    return {name: round(host_seconds(call) * 1e6, 1) for name, call in calls.items()}


def print_table(bench: Bench, launches: dict[str, float]) -> None:
    print(f"\n{'kernel':<13}{'case':<19}{'path':<17}{'us':>9}{'T/s':>8}{'share':>7}{'error':>9}")
    for row in bench.rows:
        if row.path in ("triton", "flashinfer"):
            error = "" if row.error is None else f"{row.error:.1e}"
            line = f"{row.kernel:<13}{row.case:<19}{row.path:<17}{row.microseconds:>9.1f}{row.rate:>8.2f}"
            print(f"{line}{row.share:>7.0%}{error:>9}")
    swept = [row for row in bench.rows if "/" in row.path]
    for kernel, case in dict.fromkeys((row.kernel, row.case) for row in swept):
        best = sorted(
            (r for r in swept if (r.kernel, r.case) == (kernel, case)), key=lambda r: r.microseconds
        )
        top = ", ".join(f"{row.path} {row.microseconds:.1f} us ({row.share:.0%})" for row in best[:3])
        print(f"best {kernel} {case}: {top}")
    print("host us per eager call: " + ", ".join(f"{name} {cost}" for name, cost in launches.items()))
    print(f"ceilings: copy {bench.bandwidth / 1e12:.2f} TB/s, matmul {bench.matmul / 1e12:.0f} TFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m strata.bench.kernels", description=__doc__)
    parser.add_argument("--json", type=Path, help="write all rows, ceilings and versions there")
    parser.add_argument("--sweep", action="store_true", help="try several tile shapes per Triton kernel")
    parser.add_argument("--no-flashinfer", action="store_true", help="measure the Triton path alone")
    parser.add_argument(
        "--flashinfer-prefill", action="store_true", help="FlashInfer's prefill too: minutes to compile"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("strata.bench.kernels: needs a CUDA device, and torch sees none here")
    torch.manual_seed(SEED)
    begin = time.perf_counter()
    bench = Bench()
    for bs, context in DECODE_CASES:
        bench.attention(
            DecodeCase(bs, context), DECODE_SWEEP if options.sweep else (), not options.no_flashinfer
        )
        torch.cuda.empty_cache()
    for shape in PREFILL_CASES:
        bench.attention(
            PrefillCase(*shape), PREFILL_SWEEP if options.sweep else (), options.flashinfer_prefill
        )
        torch.cuda.empty_cache()
    bench.elementwise()
    launches = launch_costs()
    if options.json:
        report = provenance(SEED, "cuda") | {
            "copy_bytes_per_s": bench.bandwidth,
            "matmul_flops_per_s": bench.matmul,
            "rows": [asdict(row) for row in bench.rows],
            "host_us_per_call": launches,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print_table(bench, launches)
    print(f"took {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
