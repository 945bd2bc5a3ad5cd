"""Runs ``strata`` as a user does: a process of its own, its exit code, and what it printed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    def is_one_line_error(self) -> bool:
        """One line on stderr, exit code 2, and no traceback: what every user error looks like."""
        return self.code == 2 and self.err.count("\n") == 1 and "Traceback" not in self.err


def strata(*arguments: str, stdin: str = "", timeout: float = 120, **environment: str) -> Ran:
    ran = subprocess.run(
        [sys.executable, "-m", "strata", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "COLUMNS": "100", **environment},
    )
    return Ran(ran.returncode, ran.stdout, ran.stderr)
