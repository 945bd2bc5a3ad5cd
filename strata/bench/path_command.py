"""`strata bench --shape NAME`: stages on dummy weights, one attention path after the other.

Every workload of every path stands alone: one that fails is told and the next goes on, with a fresh engine.
What is measured is written at once, so a run that is cut short leaves what it had.
"""

from __future__ import annotations

import gc
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..console import make_console
from .command import has_path
from .device_trace import DECODE_LAYER_LAUNCHES
from .floors import Floors, measure_ceilings
from .path_engine import PathEngine
from .path_workloads import PATH_WORKLOADS, PathRow
from .report import provenance, write_json
from .setup import BenchSetup
from .shapes import SHAPES, write_model_folder

if TYPE_CHECKING:
    from rich.table import Table


class PathBench:
    """One run: what is common to all paths, and the rows and failures so far."""

    def __init__(self, shape_name: str, setup: BenchSetup, json_path: Path | None, folder: Path) -> None:
        self.setup, self.json_path, self.folder = setup, json_path, folder
        self.shape_name, self.shape = shape_name, SHAPES[shape_name]
        self.console = make_console()
        self.rows: list[PathRow] = []
        self.failures: list[dict[str, str]] = []
        itemsize = getattr(torch, setup.dtype).itemsize
        self.floors = Floors(self.shape, itemsize, measure_ceilings(setup.device))
        # Asked while the device is still warm from its ceilings: at rest the clocks say nothing.
        self.provenance = provenance(setup.seed, setup.device)
        write_model_folder(self.shape, folder)

    def run_path(self, stage: str, path: str, names: Sequence[str]) -> None:
        """All workloads ``names`` on one path, in one engine unless one of them fails."""
        engine: PathEngine | None = None
        for name in names:
            started = time.perf_counter()
            try:
                engine = engine or PathEngine(stage, path, self.shape, self.folder, self.setup)
                # One by one: the rows before a failure stay.
                for row in PATH_WORKLOADS[name](self.setup, engine, self.floors):
                    self.rows.append(row)
                outcome = "done"
            except Exception as error:
                traceback.print_exc()
                outcome = f"{type(error).__name__}: {error}".splitlines()[0]
                self.failures.append({"workload": name, "path": f"{stage} {path}", "problem": outcome})
                engine = None
            self.console.print(f"{name} on {stage} {path}: {outcome} ({time.perf_counter() - started:.1f} s)")
            _release(self.setup.device)
            if self.json_path is not None:
                write_json(self.json_path, self.report())
        engine = None
        _release(self.setup.device)

    def report(self) -> dict[str, Any]:
        return {
            **self.provenance,
            "shape": {"name": self.shape_name, **asdict(self.shape)},
            "setup": {**asdict(self.setup), "model_path": None},
            "ceilings": asdict(self.floors.ceilings),
            "expected_launches_per_decode_layer": DECODE_LAYER_LAUNCHES,
            "rows": [asdict(row) for row in self.rows],
            "failures": self.failures,
        }

    def print_result(self) -> None:
        self.console.print(path_table(self.rows))
        ceilings = self.floors.ceilings
        self.console.print(
            f"Floors: {self.floors.shape.step_weights * self.floors.itemsize / 1e9:.2f} GB of weights a step, "
            f"copy {ceilings.copy_bytes_per_s / 1e12:.2f} TB/s, "
            f"matmul {ceilings.matmul_flops_per_s / 1e12:.1f} TFLOP/s."
        )
        for failure in self.failures:
            self.console.print(f"FAILED {failure['workload']} on {failure['path']}: {failure['problem']}")


def run_path_bench(
    names: Sequence[str], paths: Sequence[str], shape_name: str, setup: BenchSetup, json_path: Path | None
) -> bool:
    """Run ``names`` on each stage and attention path; True if nothing failed."""
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as folder:
        bench = PathBench(shape_name, setup, json_path, Path(folder))
        for stage in setup.stages:
            for path in paths:
                if has_path(stage, path, setup.device):
                    bench.run_path(stage, path, names)
                else:
                    bench.console.print(f"{stage} has no path {path}: left out")
    bench.print_result()
    return not bench.failures


def path_table(rows: Sequence[PathRow]) -> Table:
    """Gap: what the device does not do of a step; idle: what of it the host spends before and after launching;
    but fwd: everything beside the forward pass."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("workload", "case", "path"):
        result.add_column(name)
    for name in (
        "tok/s",
        "ms a step",
        "p10",
        "floor",
        "of floor",
        "device",
        "gap",
        "idle",
        "but fwd",
        "launches",
    ):
        result.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        result.add_row(
            row.workload,
            row.case,
            row.path,
            f"{row.tokens_per_s:,.0f}",
            f"{row.step_ms:.2f}",
            _optional(row.fast_step_ms, ".2f"),
            _optional(row.floor_ms, ".2f"),
            _optional(row.of_floor, ".0%"),
            _optional(row.device_ms, ".2f"),
            _optional(row.host_gap_ms, ".2f"),
            f"{row.idle_ms:.2f}",
            f"{row.scheduler_ms:.2f}",
            _optional(row.launches, ".0f"),
        )
    return result


def _optional(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)


def _release(device: str) -> None:
    """An engine that nobody holds any more leaves the device's memory to the next."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
