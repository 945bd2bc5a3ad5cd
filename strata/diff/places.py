"""From what a user types, ``FILE`` or ``FILE::SYMBOL``, to the same place in two stages."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UserError
from ..lineage.symbols import symbols
from ..lineage.table import load_lineage
from ..stages import Stage
from .pairs import FilePair, pair_files, read_lines


@dataclass(frozen=True)
class Place:
    """Lines of one stage's file: all of it, or one symbol. ``lines`` is empty where the stage has no such place."""

    stage: Stage
    path: str | None
    symbol: str
    first_line: int
    lines: tuple[str, ...]

    @property
    def name(self) -> str:
        if self.path is None:
            return f"{self.stage.key} (not there)"
        return f"{self.stage.key} {self.path}" + (f"::{self.symbol}" if self.symbol else "")


def find_places(older: Stage, newer: Stage, what: str) -> tuple[Place, Place]:
    """The place called ``what`` (of either stage; a path's end is enough) in both; ``UserError`` if in neither."""
    wanted, _, symbol = what.partition("::")
    pair = _find_pair(older, newer, wanted)
    if not symbol:
        return _whole(older, pair.older), _whole(newer, pair.newer)
    new_symbol, old_symbol = _symbol_names(newer, pair, symbol)
    places = _part(older, pair.older, old_symbol), _part(newer, pair.newer, new_symbol)
    if not any(place.lines for place in places):
        raise UserError(
            f"{pair.path} has no symbol {symbol!r} in {older.key} or {newer.key}",
            f"It has, among others: {', '.join(_known_symbols(older, newer, pair)[:12])}",
        )
    return places


def _find_pair(older: Stage, newer: Stage, wanted: str) -> FilePair:
    wanted = wanted.removeprefix(f"stages/{newer.package}/").removeprefix(f"stages/{older.package}/")
    pairs = pair_files(older, newer)
    found = [pair for pair in pairs if wanted in (pair.newer, pair.older)] or [
        pair
        for pair in pairs
        if any((path or "").endswith(f"/{wanted}") for path in (pair.newer, pair.older))
    ]
    # An older path may have several heirs: the one that is no split-off is meant.
    main = [pair for pair in found if pair.fate != "split"] or found
    if not main:
        raise UserError(
            f"neither {older.key} nor {newer.key} has a file {wanted!r}",
            f"`strata diff {older.key} {newer.key}` lists them",
        )
    if len(main) > 1:
        names = ", ".join(pair.path for pair in main)
        raise UserError(f"{wanted!r} may mean {names}", "Type more of the path")
    return main[0]


def _symbol_names(newer: Stage, pair: FilePair, symbol: str) -> tuple[str, str]:
    """The symbol's names in the newer and the older file; ``symbol`` may be either."""
    for row in load_lineage().symbols:
        if row.stage == newer.key and row.path == pair.newer and row.ancestor:
            before = row.ancestor.partition("::")[2]
            for name, other, swap in ((row.symbol, before, False), (before, row.symbol, True)):
                if symbol == name or symbol.startswith(f"{name}."):
                    renamed = other + symbol.removeprefix(name)
                    return (renamed, symbol) if swap else (symbol, renamed)
    return symbol, symbol


def _whole(stage: Stage, path: str | None) -> Place:
    return Place(stage, path, "", 1, tuple(read_lines(stage, path)) if path else ())


def _part(stage: Stage, path: str | None, symbol: str) -> Place:
    lines = read_lines(stage, path) if path else []
    found = symbols("\n".join(lines)).get(symbol)
    if found is None:
        return Place(stage, None, symbol, 1, ())
    return Place(stage, path, symbol, found.first_line, tuple(lines[found.first_line - 1 : found.last_line]))


def _known_symbols(older: Stage, newer: Stage, pair: FilePair) -> list[str]:
    names: dict[str, None] = {}
    for stage, path in ((newer, pair.newer), (older, pair.older)):
        if path:
            names |= dict.fromkeys(symbols("\n".join(read_lines(stage, path))))
    return list(names)
