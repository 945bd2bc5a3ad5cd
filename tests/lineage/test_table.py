"""The lineage table against the stages that exist: every file has its row, and no row has lost its file."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest

from strata.diff.lines import upstream_lines
from strata.lineage.compare import python_files, stale, unlisted
from strata.lineage.table import SUPPORT, load_lineage
from strata.stages import ROOT, Stage, existing_stages

LINEAGE = load_lineage()


@pytest.mark.parametrize("stage", existing_stages(), ids=lambda stage: stage.key)
def test_every_file_of_a_stage_has_a_row(stage: Stage) -> None:
    """Its own, or that of the stage before where nothing is to be said anew."""
    files = [path for path in python_files(stage) if not path.startswith(SUPPORT)]
    without = [path for path in files if LINEAGE.file(stage.key, path) is None]
    assert [path for path in without if not path.endswith("__init__.py")] == []


@pytest.mark.parametrize("stage", existing_stages(), ids=lambda stage: stage.key)
def test_every_row_has_its_file(stage: Stage) -> None:
    rows = [row.path for row in LINEAGE.files if row.stage == stage.key]
    assert sorted(set(rows)) == sorted(rows)
    assert set(rows) <= set(python_files(stage))


def test_the_table_explains_every_difference_and_no_other() -> None:
    for older, newer in pairwise(existing_stages()):
        assert unlisted(older, newer, LINEAGE) == []
        assert stale(older, newer, LINEAGE) == []


@pytest.mark.parametrize("stage", existing_stages(), ids=lambda stage: stage.key)
def test_every_ancestor_existed_at_the_stage_s_commit(stage: Stage) -> None:
    rows = [LINEAGE.file(stage.key, path) for path in python_files(stage) if not path.startswith(SUPPORT)]
    named = {row.upstream for row in rows if row is not None and row.upstream}
    assert named - set(upstream_lines(stage)) == set()


def test_every_row_is_complete() -> None:
    for row in LINEAGE.files:
        assert row.what and row.chapter, row
        assert row.stage in LINEAGE.commits, row


def test_support_is_the_same_in_all_stages() -> None:
    first, *others = existing_stages()
    expected = {
        path: (first.folder / path).read_bytes() for path in python_files(first) if path.startswith(SUPPORT)
    }
    for stage in others:
        found = {
            path: (stage.folder / path).read_bytes()
            for path in python_files(stage)
            if path.startswith(SUPPORT)
        }
        assert found == expected, stage.key


def test_where_answers_and_names_what_it_does_not_know() -> None:
    command = [sys.executable, "-m", "strata", "where"]
    for folder, commit in (
        ("stages/v0_1_genesis/", "22085081b"),
        ("", LINEAGE.commits[existing_stages()[-1].key]),
    ):
        found = subprocess.run(
            [*command, f"{folder}memory_pool.py"], capture_output=True, text=True, check=True, cwd=ROOT
        )
        assert f"python/sglang/srt/memory_pool.py @ {commit}" in found.stdout
    lost = subprocess.run([*command, "memory_pond.py"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert lost.returncode == 2 and lost.stderr.count("\n") == 1 and "memory_pond.py" in lost.stderr
