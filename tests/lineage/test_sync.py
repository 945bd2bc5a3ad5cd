"""`strata sync` and the comparison of stages, on two small stages in a repository of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from strata.errors import UserError
from strata.lineage import sync
from strata.lineage.compare import Difference, differences, stale, unlisted
from strata.lineage.table import FileRow, Lineage, SymbolRow
from strata.stages import Stage

OLD = Stage("v0.1", "old", "January", "")
NEW = Stage("v0.2", "new", "July", "")

POOL = """def alloc(n: int) -> int:
    return n


def free(n: int) -> int:
    return -n


def clear() -> None:
    pass
"""
LINEAGE = Lineage(
    {},
    (FileRow("v0.2", "pools.py", "", "renamed", ancestor="pool.py"),),
    (SymbolRow("v0.2", "pools.py", "release", "renamed", "", ancestor="pool.py::free"),),
)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two committed stages; the newer one renames the file and one function."""
    for stage, name, source in (
        (OLD, "pool.py", POOL),
        (NEW, "pools.py", POOL.replace("def free", "def release")),
    ):
        folder = tmp_path / "stages" / stage.package
        (folder / "support").mkdir(parents=True)
        (folder / "launch_server.py").write_text("")
        (folder / name).write_text(source)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "stages")
    monkeypatch.setattr("strata.stages.ROOT", tmp_path)
    monkeypatch.setattr("strata.stages.TABLE", (OLD, NEW))
    monkeypatch.setattr(sync, "ROOT", tmp_path)
    monkeypatch.setattr(sync, "TABLE", (OLD, NEW))
    monkeypatch.setattr(sync, "load_lineage", lambda: LINEAGE)
    return tmp_path / "stages"


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)


def test_a_rename_that_the_table_explains_is_all_that_differs(repository: Path) -> None:
    assert differences(OLD, NEW, LINEAGE) == {Difference("pools.py", "release", "changed")}
    assert unlisted(OLD, NEW, LINEAGE) == [] and stale(OLD, NEW, LINEAGE) == []


def test_what_the_table_does_not_explain_is_named(repository: Path) -> None:
    pools = repository / "new" / "pools.py"
    pools.write_text(pools.read_text().replace("return n", "return n + 1").replace("def clear", "def wipe"))
    assert unlisted(OLD, NEW, LINEAGE) == [
        Difference("pools.py", "alloc", "changed"),
        Difference("pools.py", "clear", "removed"),
        Difference("pools.py", "wipe", "new"),
    ]


def test_a_row_without_its_difference_is_stale(repository: Path) -> None:
    row = SymbolRow("v0.2", "pools.py", "alloc", "changed", "")
    lineage = Lineage({}, LINEAGE.files, (*LINEAGE.symbols, row))
    assert stale(OLD, NEW, lineage) == ["pools.py::alloc"]


@pytest.mark.parametrize("forward", [True, False])
def test_a_fix_reaches_the_renamed_file_of_the_other_stage(repository: Path, forward: bool) -> None:
    pool, pools = repository / "old" / "pool.py", repository / "new" / "pools.py"
    changed, other = (pool, pools) if forward else (pools, pool)
    changed.write_text(changed.read_text().replace("return n\n", "return max(n, 0)\n"))
    assert sync.run_sync() == [other]
    assert "max(n, 0)" in other.read_text()
    assert ("def release" in other.read_text()) is forward


def test_a_new_support_file_is_copied(repository: Path) -> None:
    (repository / "old" / "support" / "clock.py").write_text("NOW = 0\n")
    sync.run_sync()
    assert (repository / "new" / "support" / "clock.py").read_text() == "NOW = 0\n"


def test_where_the_stages_have_drifted_nothing_is_written(repository: Path) -> None:
    pool, pools = repository / "old" / "pool.py", repository / "new" / "pools.py"
    before = pools.read_text()
    pool.write_text(
        pool.read_text().replace("def free(n: int)", "def free(count: int)").replace("-n", "-count")
    )
    with pytest.raises(UserError, match="drifted"):
        sync.run_sync()
    assert pools.read_text() == before


def test_two_changed_stages_are_refused(repository: Path) -> None:
    for path in (repository / "old" / "pool.py", repository / "new" / "pools.py"):
        path.write_text(path.read_text() + "\nX = 1\n")
    with pytest.raises(UserError, match=r"v0.1 and v0.2"):
        sync.run_sync()
