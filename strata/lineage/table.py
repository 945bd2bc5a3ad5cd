"""The lineage table, ``book/data/lineage.toml``: where each file and symbol comes from, and why it changed.

Read-only data for tests, `strata where` and the book. A row names a place in one stage, its ancestor in the
stage before (by the same path and name unless the row says else), and history's file, PR and chapter.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ..stages import ROOT

TABLE_PATH = ROOT / "book" / "data" / "lineage.toml"

Change = Literal["new", "moved", "renamed", "split", "changed", "removed"]


@dataclass(frozen=True)
class FileRow:
    """One file of a stage. ``upstream`` is history's file at the stage's commit, empty where it had none."""

    stage: str
    path: str
    upstream: str
    what: str
    ancestor: str = ""
    pr: str = ""
    chapter: int = 0


@dataclass(frozen=True)
class SymbolRow:
    """One symbol that differs from its ancestor in the stage before."""

    stage: str
    path: str
    symbol: str
    change: Change
    what: str
    ancestor: str = ""
    """``file::symbol`` in the stage before, where path or name differ."""
    pr: str = ""
    chapter: int = 0


SUPPORT = "support/"
"""What history did not have; ours, and the same in all stages."""


@dataclass(frozen=True)
class Lineage:
    commits: dict[str, str]
    """Stage -> the upstream commit that it retells."""
    files: tuple[FileRow, ...]
    symbols: tuple[SymbolRow, ...]

    def file(self, stage: str, path: str) -> FileRow | None:
        """The row of a file; one that keeps its path and its story from the stage before needs none of its own."""
        rows = {row.stage: row for row in self.files if row.path == path and row.stage <= stage}
        return rows[max(rows)] if rows else None

    def ancestor_path(self, stage: str, path: str) -> str:
        """The path in the stage before; the same unless the table says else."""
        row = self.file(stage, path)
        return row.ancestor if row is not None and row.stage == stage and row.ancestor else path


@cache
def load_lineage(path: Path = TABLE_PATH) -> Lineage:
    """Read the table; raises ``ValueError`` naming the first bad row."""
    data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    return Lineage(
        data.get("commits", {}),
        tuple(_row(FileRow, row) for row in data.get("file", [])),
        tuple(_row(SymbolRow, row) for row in data.get("symbol", [])),
    )


def _row(kind: Any, row: dict[str, Any]) -> Any:
    try:
        return kind(**row)
    except TypeError as error:
        raise ValueError(f"lineage.toml: {row}: {error}") from error
