"""Our line counts beside history's: how large each file was upstream, and what retells it here."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import dataclass

from ..lineage.compare import python_files
from ..lineage.table import SUPPORT, load_lineage
from ..stages import ROOT, Stage
from .pairs import read_lines

HISTORY = ROOT / "book" / "data" / "history"
OURS = "(history had none)"


@dataclass(frozen=True)
class LineCount:
    """One upstream file, or all that history had not: its lines there, and the files that retell it here."""

    upstream: str
    upstream_lines: int | None
    files: dict[str, int]

    @property
    def lines(self) -> int:
        return sum(self.files.values())


def upstream_lines(stage: Stage) -> dict[str, int]:
    """Path -> number of lines of every Python file of history at the stage's commit."""
    with (HISTORY / f"files_{stage.package}.tsv").open(encoding="utf-8", newline="") as table:
        return {row["path"]: int(row["lines"]) for row in csv.DictReader(table, delimiter="\t")}


def count_lines(stage: Stage) -> list[LineCount]:
    """Every file of the stage, gathered by the upstream file that it retells, in that file's order."""
    lineage, history = load_lineage(), upstream_lines(stage)
    retold: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for path in python_files(stage):
        row = None if path.startswith(SUPPORT) else lineage.file(stage.key, path)
        upstream = row.upstream if row is not None and row.upstream else OURS
        retold[upstream][path] = len(read_lines(stage, path))
    return [LineCount(upstream, history.get(upstream), files) for upstream, files in sorted(retold.items())]
