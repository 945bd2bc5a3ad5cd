"""What a run tells: a few lines and a table on the terminal, one JSON object in a file."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .. import STAGE
from .metrics import Spread, Summary

SPREADS = {
    "ttft_ms": "time to first token",
    "itl_ms": "inter-token latency",
    "tpot_ms": "time per output token",
    "e2e_ms": "end-to-end latency",
}
PACKAGES = ("strata", "httpx", "torch")


def print_summary(console: Console, summary: Summary) -> None:
    """Counts and rates line by line, then each latency's mean, median and tail."""
    lines = {
        "completed requests": f"{summary.completed}",
        "failed requests": f"{summary.failed}",
        "duration": f"{summary.duration_s:.2f} s",
        "input tokens": f"{summary.prompt_tokens} ({summary.cached_tokens} from the cache)",
        "output tokens": f"{summary.output_tokens}",
        "request throughput": f"{summary.request_throughput:.2f} requests/s",
        "input throughput": f"{summary.input_throughput:.2f} tokens/s",
        "output throughput": f"{summary.output_throughput:.2f} tokens/s",
        "total throughput": f"{summary.total_throughput:.2f} tokens/s",
        "mean concurrency": f"{summary.concurrency:.2f}",
    }
    for name, value in lines.items():
        console.print(f"{name:<20} {value}", highlight=False)
    table = Table()
    table.add_column("milliseconds")
    for column in ("mean", "median", "p90", "p99"):
        table.add_column(column, justify="right")
    for name, title in SPREADS.items():
        table.add_row(title, *_cells(getattr(summary, name)))
    console.print(table)


def _cells(spread: Spread | None) -> list[str]:
    if spread is None:
        return ["–"] * 4
    return [f"{value:.2f}" for value in (spread.mean, spread.median, spread.p90, spread.p99)]


def provenance(args: Mapping[str, Any]) -> dict[str, Any]:
    """What a reader needs to repeat a run: its arguments, without any key, the versions and the date."""
    return {
        "stage": STAGE,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "args": {name: _plain(value) for name, value in args.items() if name != "api_key"},
        "versions": {"python": platform.python_version(), **_versions(PACKAGES)},
    }


def _plain(value: Any) -> Any:
    """JSON has no infinity."""
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def check_output_file(path: str) -> None:
    """Raise ``ValueError``, before a run whose numbers would be lost, if there can be no such file."""
    if not Path(path).resolve().parent.is_dir():
        raise ValueError(f"--output-file {path}: there is no such folder.")
    if Path(path).is_dir():
        raise ValueError(f"--output-file {path} is a folder: name a file in it.")


def write_json(path: str, report: Mapping[str, Any]) -> None:
    """Raises ``OSError`` if the file can't be written."""
    Path(path).write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
