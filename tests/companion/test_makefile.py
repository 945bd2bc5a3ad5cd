"""The Makefile does what a target needs first, and nothing twice. The tools behind it are stand-ins here."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from strata.stages import ROOT

# Stands for the system's Python and, once "installed", for everything in .venv/bin: each notes its call.
TOOL = """#!/bin/sh
echo "$(basename "$0") $*" >> "{log}"
if [ "$1 $2" = "-m venv" ]; then
    mkdir -p "$3/bin"
    for name in python strata ruff mypy; do cp "$0" "$3/bin/$name"; done
fi
if [ "$1 $2" = "-m pip" ] && [ -n "$FAIL_PIP" ]; then exit 1; fi
"""


class Checkout:
    """A folder with our Makefile and stand-ins for what it calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        for name in ("Makefile", "constraints.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, folder / name)
        self.python = folder / "system-python"
        self.python.write_text(TOOL.format(log=self.log))
        self.python.chmod(0o755)

    def make(self, *arguments: str, **environment: str) -> list[str]:
        """Run make; return the calls it made. Raises CalledProcessError if it fails."""
        self.log.write_text("")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        command = ["make", "--silent", f"PYTHON={self.python}", *arguments]
        environment = {**inherited, **environment}
        subprocess.run(command, cwd=self.folder, env=environment, check=True, timeout=60, capture_output=True)
        return self.log.read_text().splitlines()

    def touch(self, name: str) -> None:
        """Make a file newer than the stamp, whatever the file system's clock."""
        later = time.time() + 5
        os.utime(self.folder / name, (later, later))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_setup_installs_once_with_the_constraints(checkout: Checkout) -> None:
    venv, install = checkout.make("setup")
    assert venv == "system-python -m venv .venv"
    assert "--constraint constraints.txt" in install and install.endswith("--editable .[dev]")
    assert checkout.make("setup") == []


@pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml"])
def test_changed_versions_set_up_again(checkout: Checkout, name: str) -> None:
    checkout.make("setup")
    checkout.touch(name)
    assert len(checkout.make("setup")) == 2


def test_a_failed_setup_is_tried_again(checkout: Checkout) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        checkout.make("setup", FAIL_PIP="1")
    assert len(checkout.make("setup")) == 2


def test_serve_passes_stage_and_port_after_the_model(checkout: Checkout) -> None:
    checkout.make("setup")
    assert checkout.make("serve") == ["strata model fetch", "strata serve latest --port 30000"]
    assert checkout.make("serve", "STAGE=v0.1", "PORT=31000")[-1] == "strata serve v0.1 --port 31000"


def test_test_and_check(checkout: Checkout) -> None:
    checkout.make("setup")
    assert checkout.make("test") == ["strata model fetch", "python -m pytest"]
    check = checkout.make("check")
    assert check[0] == "ruff check" and check[-1].startswith("python -m pytest -m not slow")


def test_gpu_test_takes_the_named_python_as_it_is(checkout: Checkout) -> None:
    (run,) = checkout.make("gpu-test")
    assert run.startswith("system-python -m pytest -m cuda2 or (cuda and not slow)")
    assert not (checkout.folder / ".venv").exists()


def test_every_target_is_in_the_help(checkout: Checkout) -> None:
    text = (checkout.folder / "Makefile").read_text()
    phony = next(line for line in text.splitlines() if line.startswith(".PHONY:"))
    out = subprocess.run(
        ["make", "--silent"], cwd=checkout.folder, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert {line.split()[0] for line in out.splitlines()[:-1]} == set(phony.split()[1:])
