"""Runs ``cases/`` under Triton's interpreter, in a process of its own.

Triton reads ``TRITON_INTERPRET`` when a kernel is decorated, that is, at import: a process in which some
kernel was imported without it can't turn it on any more, and no other test should run with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "cases"
ROOT = CASES.parents[2]


@pytest.mark.slow
def test_kernels_match_torch_under_the_interpreter() -> None:
    environment = dict(os.environ, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    # No conftest from outside this folder: the suite's own looks for engines, and the kernels need none.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-p",
        "no:cacheprovider",
        f"--confcutdir={CASES}",
        str(CASES),
    ]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, f"{run.stdout[-6000:]}\n{run.stderr[-2000:]}"
    assert "passed" in run.stdout and "skipped" not in run.stdout
