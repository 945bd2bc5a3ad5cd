"""Fixtures and rules of the whole suite.

- ``stage`` runs a test once per stage that exists; ``@needs("capability")`` skips it where the stage's
  CAPABILITIES lack one. Nothing else may skip: any other skip is turned into a failure here.
- Tests marked ``cuda`` are deselected unless the ``-m`` expression asks for them.
- How many tests each stage has is pinned (`tests/shared/test_counts.py`) and printed at the end.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from strata.adapters import DIALECTS, existing_stages

# Tiny models gain nothing from threads, and idle ones of torch spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SHARED = Path(__file__).parent / "shared"
CAPABILITY_SKIP = "stage lacks capability"

# The same examples in every run, so that a failure is the change's; HYPOTHESIS_PROFILE=search looks for new ones.
settings.register_profile(
    "suite", derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
settings.register_profile("search", deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))

pytest_plugins = ["tests.shared.fixtures", "tests.gpu_run"]

collected: dict[str, Counter[str]] = defaultdict(Counter)
"""Shared tests collected in this run: file name -> stage -> count, before anything was deselected."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*capabilities): runs on stages that have all of them")


def stage_of(item: pytest.Item) -> str | None:
    """The stage that a test is about: its ``stage`` parameter or its class's ``stage``."""
    callspec = getattr(item, "callspec", None)
    if callspec is not None and "stage" in callspec.params:
        return str(callspec.params["stage"])
    return getattr(getattr(item, "cls", None), "stage", None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = any("stage" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "stage" in metafunc.fixturenames and not own and not hasattr(metafunc.cls, "stage"):
        metafunc.parametrize("stage", existing_stages(), scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if SHARED in item.path.parents and (stage := stage_of(item)) is not None:
            collected[item.path.name][stage] += 1
            item.user_properties.append(("stage", stage))
    if "cuda" not in config.getoption("-m"):
        on_gpu = [item for item in items if item.get_closest_marker("cuda")]
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if item not in on_gpu]


def pytest_runtest_setup(item: pytest.Item) -> None:
    stage = stage_of(item)
    if stage is None:
        return
    for marker in item.iter_markers("needs"):
        for capability in marker.args:
            if capability not in DIALECTS[stage].capabilities:
                pytest.skip(f"{CAPABILITY_SKIP} {stage} {capability}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and CAPABILITY_SKIP not in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} skipped for another reason than CAPABILITIES: {report.longrepr}"
    if report.failed and "servers" in getattr(item, "fixturenames", ()):
        from tests.shared.fixtures import RUNNING_SERVERS

        for key, driver in RUNNING_SERVERS.items():
            report.sections.append((f"log of server {' '.join(key)}", driver.tail(12)))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.outcome == "skipped":
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} skipped while it was collected: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            stage = dict(getattr(report, "user_properties", [])).get("stage")
            if stage is not None:
                outcomes[stage][outcome] += 1
    for stage, counts in sorted(outcomes.items()):
        summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        terminalreporter.write_line(f"shared suite, {stage}: {summary}")
