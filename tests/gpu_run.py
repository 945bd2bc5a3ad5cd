"""`make gpu-test`: the shared suite's engine tests once for each attention path of a CUDA device, and a summary.

A plugin of `tests/conftest.py` that only acts when the ``-m`` expression asks for ``cuda``: tests that take the
``engines`` fixture then get engines on the device instead of the CPU, in float32, with torch's and with
Triton's attention (FlashInfer has no float32: `tests/shared/test_half_precision.py` has all three in bfloat16).
Tests marked ``cuda2`` stay out where there are not two devices. Runs with or without pytest-xdist.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import pytest

FLOAT32_PATHS = ("torch", "triton")
LABEL, ERROR = "gpu-test path", "logit error"
"""Properties of a report: which line of the summary it counts for, and how far off its logits were."""


def asked_for(config: pytest.Config) -> bool:
    return "cuda" in config.getoption("-m")


def pytest_configure(config: pytest.Config) -> None:
    if asked_for(config) and hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # what compiles for minutes stands first on the command line


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engines" in metafunc.fixturenames and asked_for(metafunc.config):
        paths = [pytest.param(path, marks=pytest.mark.cuda) for path in FLOAT32_PATHS]
        metafunc.parametrize("engines", paths, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not asked_for(config):
        return
    import torch

    if torch.cuda.device_count() < 2:
        on_two = [item for item in items if item.get_closest_marker("cuda2")]
        config.hook.pytest_deselected(items=on_two)
        items[:] = [item for item in items if item not in on_two]
    for item in items:
        label = label_of(item)
        item.user_properties.append((LABEL, label))
        if "engines" in getattr(item, "fixturenames", ()) and config.pluginmanager.hasplugin("xdist"):
            # One worker for tests that share engines.
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {label}"))


def label_of(item: pytest.Item) -> str:
    """The summary's line for a test."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    if "engines" in params:
        return f"{params['engines']} float32"
    if item.path.stem == "test_half_precision":
        return f"{params['attention']} bfloat16"
    if item.get_closest_marker("cuda2"):
        return "two ranks, NCCL"
    return "attention contract" if item.path.stem == "test_attention" else "kernels alone"


@dataclass
class Line:
    """One line of the summary."""

    passed: int = 0
    failed: int = 0
    seconds: float = 0.0
    worst: float | None = None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not asked_for(config):
        return
    lines: defaultdict[str, Line] = defaultdict(Line)
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            properties = dict(getattr(report, "user_properties", []))
            if LABEL not in properties:
                continue
            line = lines[properties[LABEL]]
            line.passed += outcome == "passed"
            line.failed += outcome != "passed"
            line.seconds += report.duration
            if ERROR in properties:
                line.worst = max(line.worst or 0.0, properties[ERROR])
    terminalreporter.section("gpu-test")
    terminalreporter.write_line(f"on {machine()}")
    terminalreporter.write_line(f"{'path':<20}{'passed':>8}{'failed':>8}{'seconds':>9}  worst logit error")
    for label, line in sorted(lines.items()):
        worst = "" if line.worst is None else f"{line.worst:.1e}"
        terminalreporter.write_line(
            f"{label:<20}{line.passed:>8}{line.failed:>8}{line.seconds:>9.1f}  {worst}"
        )
    terminalreporter.write_line(
        "float32: the largest difference of a logit from transformers', limit 1e-3; greedy tokens equal.\n"
        "bfloat16: the same as a share of the largest logit of its row, limit 2e-2."
    )


def machine() -> str:
    """Devices and versions, for the record."""
    import torch

    count = torch.cuda.device_count()
    devices = f"{count} x {torch.cuda.get_device_name(0)}" if count else "no CUDA device"
    versions = [devices]
    for package in ("torch", "triton", "flashinfer-python", "transformers"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"no {package}")
    return ", ".join(versions)
