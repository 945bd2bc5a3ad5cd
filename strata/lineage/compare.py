"""What really differs between two neighbouring stages, and whether the lineage table says so.

Pure functions over the stages' sources; a test and `strata sync` readers use them. Two stages differ in a
symbol when its fingerprint does; a file that is new in a stage counts as one difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..stages import Stage
from .symbols import Symbol, symbols
from .table import Lineage


@dataclass(frozen=True, order=True)
class Difference:
    """A symbol of ``path`` (in the newer stage) that differs; ``symbol`` is empty for a whole new file."""

    path: str
    symbol: str
    kind: str
    """"new", "changed" or "removed"."""


def python_files(stage: Stage) -> list[str]:
    """Paths of a stage's sources, relative to its folder."""
    return sorted(path.relative_to(stage.folder).as_posix() for path in stage.folder.rglob("*.py"))


def differences(older: Stage, newer: Stage, lineage: Lineage) -> set[Difference]:
    """Everything in which ``newer`` is not what ``older`` was, by the table's own account of what became what."""
    old_symbols = {path: symbols(_read(older, path)) for path in python_files(older)}
    renamed = _ancestors(newer, lineage)
    found: set[Difference] = set()
    inherited: set[tuple[str, str]] = set()
    for path in python_files(newer):
        old_path = lineage.ancestor_path(newer.key, path)
        new_symbols = symbols(_read(newer, path))
        if old_path not in old_symbols and new_symbols:  # an empty __init__.py says nothing
            found.add(Difference(path, "", "new"))
        for name, symbol in new_symbols.items():
            ancestor = _ancestor(path, name, old_path, renamed)
            old = old_symbols.get(ancestor[0], {}).get(ancestor[1])
            if old is not None:
                inherited.add(ancestor)
                if old.fingerprint != symbol.fingerprint or (path, name) in renamed:
                    found.add(Difference(path, name, "changed"))
            elif old_path in old_symbols:
                found.add(Difference(path, name, "new"))
    return _without_members(found | set(_removed(older, newer, old_symbols, inherited, lineage)))


def _without_members(found: set[Difference]) -> set[Difference]:
    """A class that came or went is one difference: what it consists of came or went with it."""
    classes = {(d.path, d.symbol, d.kind) for d in found if d.kind in ("new", "removed")}
    return {d for d in found if (d.path, d.symbol.rpartition(".")[0], d.kind) not in classes or not d.symbol}


def unlisted(older: Stage, newer: Stage, lineage: Lineage) -> list[Difference]:
    """Differences that no row of the table explains."""
    listed = {(row.path, row.symbol) for row in lineage.symbols if row.stage == newer.key}
    listed |= {(row.path, "") for row in lineage.files if row.stage == newer.key}
    return sorted(d for d in differences(older, newer, lineage) if (d.path, d.symbol) not in listed)


def stale(older: Stage, newer: Stage, lineage: Lineage) -> list[str]:
    """Rows that explain a difference which is not there."""
    real = {(d.path, d.symbol) for d in differences(older, newer, lineage)}
    return [
        f"{row.path}::{row.symbol}"
        for row in lineage.symbols
        if row.stage == newer.key and (row.path, row.symbol) not in real
    ]


def _ancestors(newer: Stage, lineage: Lineage) -> dict[tuple[str, str], tuple[str, str]]:
    """(path, symbol) in the newer stage -> (path, symbol) in the older, where a row says that they differ."""
    pairs = {}
    for row in lineage.symbols:
        if row.stage == newer.key and row.ancestor:
            old_path, _, old_name = row.ancestor.partition("::")
            pairs[row.path, row.symbol] = (old_path, old_name)
    return pairs


def _ancestor(
    path: str, name: str, old_path: str, renamed: dict[tuple[str, str], tuple[str, str]]
) -> tuple[str, str]:
    """Where a symbol comes from; the methods of a renamed class come along with it."""
    if (path, name) in renamed:
        return renamed[path, name]
    class_name, dot, method = name.rpartition(".")
    old_file, old_class = renamed.get((path, class_name), (old_path, class_name))
    return old_file, f"{old_class}{dot}{method}"


def _removed(
    older: Stage,
    newer: Stage,
    old_symbols: dict[str, dict[str, Symbol]],
    inherited: set[tuple[str, str]],
    lineage: Lineage,
) -> Iterator[Difference]:
    """Symbols of the older stage that nothing in the newer one continues, by the path that they had."""
    for old_path, names in old_symbols.items():
        for name in names:
            if (old_path, name) not in inherited:
                yield Difference(_successor(newer, old_path, lineage), name, "removed")


def _successor(newer: Stage, old_path: str, lineage: Lineage) -> str:
    renamed = [row.path for row in lineage.files if row.stage == newer.key and row.ancestor == old_path]
    return renamed[0] if renamed else old_path


def _read(stage: Stage, path: str) -> str:
    return (Path(stage.folder) / path).read_text(encoding="utf-8")
