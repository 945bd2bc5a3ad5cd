"""What a bench run tells: a table on the terminal, and JSON with all that is needed to read it later."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..stages import ROOT
from .limits import Limits
from .measure import Row
from .setup import BenchSetup

if TYPE_CHECKING:
    from rich.table import Table

BASELINE = "transformers"
PACKAGES = ("torch", "transformers", "triton", "flashinfer-python")


def describe(setup: BenchSetup, rows: Sequence[Row], limits: Limits | None) -> dict[str, Any]:
    """Everything about one run, as plain JSON values."""
    return {
        **provenance(setup.seed, setup.device),
        "setup": {**asdict(setup), "model_path": setup.model_path.name},
        "limits": limits.as_dict() if limits else None,
        "rows": [{**asdict(row), "medians": {name: row.median(name) for name in row.values}} for row in rows],
    }


def provenance(seed: int, device: str) -> dict[str, Any]:
    """What a reader needs to repeat a run: command, commit, date, seed, versions, device and its clocks."""
    program, *arguments = sys.orig_argv
    return {
        "command": [Path(program).name, *arguments],
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seed": seed,
        "versions": {"python": platform.python_version(), **_versions()},
        "device": _device(device),
    }


def write_json(path: Path, report: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror})", "Name another file with --json") from error


def table(rows: Sequence[Row]) -> Table:
    """Medians side by side; a stage's cell also says how many times faster than transformers it is."""
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row.values))
    result = Table()
    for column in ("workload", "case", "unit"):
        result.add_column(column)
    for name in names:
        result.add_column(name, justify="right", no_wrap=True)
    result.add_column("of limit", justify="right")
    result.add_column("note")
    for row in rows:
        result.add_row(
            row.workload, row.case, row.unit, *(_cell(row, name) for name in names), _share(row), row.note
        )
    return result


def _cell(row: Row, name: str) -> str:
    if name not in row.values:
        return "–"
    value = f"{row.median(name):.1f}"
    if name == BASELINE or BASELINE not in row.values:
        return value
    return f"{value} ({row.times_faster(name, BASELINE):.2f}×)"


def _share(row: Row) -> str:
    """The best contender's share of what memory bandwidth allows."""
    if row.limit is None:
        return ""
    return f"{max(row.median(name) for name in row.values) / row.limit:.0%}"


def _commit() -> str:
    """The checkout's commit, with ``+changes`` where tracked files differ from it.

    Outside of git, as on a machine that has a copy of the files alone: what STRATA_COMMIT says.
    """
    try:
        commit = _git("rev-parse", "HEAD")
        return f"{commit}+changes" if _git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("STRATA_COMMIT", "unknown")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _device(device: str) -> dict[str, Any]:
    import torch

    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        return {
            "name": properties.name,
            "memory_gib": properties.total_memory / 2**30,
            "cuda": torch.version.cuda,
            "driver": _nvidia_smi("driver_version"),
            "clocks": _nvidia_smi("clocks.sm,clocks.mem"),
            "cpu": _cpu_name(),
        }
    return {
        "name": _cpu_name(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _nvidia_smi(fields: str) -> str | None:
    """What nvidia-smi says of the first device; None where it has nothing to say."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
