"""``strata where FILE``: what a file of a stage descends from, and the chapter that tells why."""

from __future__ import annotations

from pathlib import Path

from ..errors import UserError
from ..stages import ROOT, Stage, existing_stages
from .table import SUPPORT, load_lineage


def where(file: Path) -> list[str]:
    """Lines on the origin of ``file``; ``UserError`` if no stage has it."""
    stage, path = _locate(file)
    if path.startswith(SUPPORT):
        return [f"{path} of {stage.key}: ours, the same in all stages; history had nothing of the kind"]
    lineage = load_lineage()
    row = lineage.file(stage.key, path)
    if row is None:
        raise UserError(
            f"{path} of {stage.key} has no row in the lineage table", "Add it to book/data/lineage.toml"
        )
    lines = [f"{path} of {stage.key}: {row.what}"]
    if row.upstream:
        lines.append(f"  upstream  {row.upstream} @ {lineage.commits[stage.key]}")
    if (before := lineage.ancestor_path(stage.key, path)) != path:
        lines.append(f"  before    {before}")
    lines.append(f"  chapter   {row.chapter}" + (f", {row.pr}" if row.pr else ""))
    for symbol in lineage.symbols:
        if (symbol.stage, symbol.path) == (stage.key, path):
            lines.append(f"  {symbol.change:9} {symbol.symbol}: {symbol.what}")
    return lines


def _locate(file: Path) -> tuple[Stage, str]:
    """The stage that ``file`` lies in, and its path there; a bare path means the newest stage that has it."""
    resolved = file.resolve()
    for stage in reversed(existing_stages()):
        if resolved.is_relative_to(stage.folder) and resolved.is_file():
            return stage, resolved.relative_to(stage.folder).as_posix()
        if (stage.folder / file).is_file() and not file.is_absolute():
            return stage, file.as_posix()
    shown = resolved.relative_to(ROOT) if resolved.is_relative_to(ROOT) else file
    raise UserError(f"{shown} is no file of a stage", "Name one, such as memory_pool.py")
