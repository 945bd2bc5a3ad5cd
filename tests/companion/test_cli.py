"""The command line itself: what it lists, that it starts light, and that user errors are one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strata import stages as stage_table
from strata.errors import UserError
from strata.stages import TABLE, existing_stages, find_stage
from tests.companion.strata_command import strata

HEAVY = ("torch", "transformers", "numpy", "httpx", "rich", "fastapi")


def test_stages_lists_what_exists_with_package_and_date() -> None:
    lines = strata("stages").out.splitlines()
    assert [line.split()[:2] for line in lines] == [[s.key, s.package] for s in existing_stages()]


@pytest.mark.parametrize("arguments", [["--help"], ["stages"], ["model", "--help"], ["serve", "--help"]])
def test_light_commands_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"import sys; from strata.cli import run; run({arguments!r}); "
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("arguments", [[], ["model"], ["--help"], ["serve"]])
def test_help_is_on_stdout_and_no_error(arguments: list[str]) -> None:
    ran = strata(*arguments)
    assert (ran.code, ran.err) == (0, "") and ran.out.startswith("Usage: strata")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "nope"),
        (["stages", "--nope"], "--nope"),
        (["model", "path", "extra"], "extra"),
        (["serve", "v9.9"], "Choose one of"),
        (["chat", "v9.9"], "Choose one of"),
        (["chat", "--max-tokens", "many"], "--max-tokens"),
        (["chat", "--max-tokens", "0"], "--max-tokens"),
        (["chat", "--temperature", "-1"], "--temperature"),
        (["chat", "--url"], "--url"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_user_error_is_one_line(arguments: list[str], says: str) -> None:
    ran = strata(*arguments)
    assert ran.is_one_line_error(), ran
    assert says in ran.err


def test_a_reader_that_leaves_early_is_no_error() -> None:
    ran = subprocess.run(
        f"{sys.executable} -m strata stages | true", shell=True, capture_output=True, text=True, timeout=60
    )
    assert ran.stderr == ""


def test_stage_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Key, folder and ``latest`` work; a stage of the table that is not in the checkout is named as such."""
    monkeypatch.setattr(stage_table, "ROOT", tmp_path)
    for stage in TABLE[:2]:
        stage.folder.mkdir(parents=True)
        (stage.folder / "launch_server.py").touch()
    assert [find_stage(name).key for name in ("v0.1", "v0_2_cudagraph", "latest")] == ["v0.1", "v0.2", "v0.2"]
    with pytest.raises(UserError, match=r"v0\.3 is not in this checkout. Here: v0\.1, v0\.2"):
        find_stage("v0.3")
    with pytest.raises(UserError, match="no stage 'genesis'"):
        find_stage("genesis")
