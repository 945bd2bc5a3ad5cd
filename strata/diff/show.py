"""`strata diff` and `strata lines` in the terminal."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ..console import make_console
from ..lineage.table import load_lineage
from ..stages import Stage
from .lines import OURS, count_lines
from .pairs import FATES, FilePair, pair_files
from .places import Place, find_places

UPSTREAM = "python/sglang/"
MARKS = {"added": "+", "removed": "-", "split": "/", "renamed": ">", "changed": "~", "unchanged": " "}
STYLES = {"added": "green", "removed": "red", "split": "cyan", "renamed": "cyan", "changed": "yellow"}


def show_tree(older: Stage, newer: Stage) -> None:
    """All files with their fates; those that stayed as they were are only counted."""
    console, pairs = make_console(), pair_files(older, newer)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for pair in pairs:
        if pair.fate != "unchanged":
            table.add_row(*_tree_row(pair), style=STYLES[pair.fate])
    console.print(table)
    counts = {fate: sum(pair.fate == fate for pair in pairs) for fate in FATES}
    console.print(", ".join(f"{count} {fate}" for fate, count in counts.items() if count))
    console.print(f"One of them: strata diff {older.key} {newer.key} FILE[::SYMBOL]")


def _tree_row(pair: FilePair) -> tuple[str, str, str, str, str]:
    origin = f"from {pair.older}" if pair.fate in ("renamed", "split") else ""
    added = f"+{pair.lines_added}" if pair.lines_added else ""
    removed = f"-{pair.lines_removed}" if pair.lines_removed else ""
    return MARKS[pair.fate], pair.path, added, removed, origin


def show_place(older: Stage, newer: Stage, what: str, side_by_side: bool) -> None:
    """One file or symbol: why it changed, then how."""
    console = make_console()
    before, after = find_places(older, newer, what)
    for note in why(before, after):
        console.print(Text(f"# {note}", style="italic"))
    if before.lines == after.lines:
        console.print(f"{after.name}: the same in {older.key}")
    elif side_by_side:
        console.print(_side_by_side(before, after))
    else:
        _print_unified(console, before, after)


def why(before: Place, after: Place) -> Iterator[str]:
    """What the lineage table says of the changes that the diff shows, one line each."""
    for row in load_lineage().symbols:
        if row.stage != after.stage.key or row.path not in (after.path, before.path):
            continue
        shown = {after.symbol, before.symbol} - {""}
        if not shown or row.symbol in shown or any(row.symbol.startswith(f"{name}.") for name in shown):
            pr = f" ({row.pr})" if row.pr else ""
            yield f"{row.symbol} {row.change}: {row.what}{pr}"


def _print_unified(console: Console, before: Place, after: Place) -> None:
    lines = difflib.unified_diff(before.lines, after.lines, before.name, after.name, lineterm="")
    console.print(
        Syntax("\n".join(lines), "diff", theme="ansi_dark", background_color="default", word_wrap=True)
    )


def _side_by_side(before: Place, after: Place) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place in (before, after):
        table.add_column("", justify="right", no_wrap=True, style="dim")
        table.add_column(place.name, ratio=1, overflow="fold")
    matcher = difflib.SequenceMatcher(None, before.lines, after.lines, autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        for offset in range(max(j - i, m - k)):
            style = None if tag == "equal" else "yellow"
            left = _cell(before, i + offset, j, "red" if tag == "delete" else style)
            right = _cell(after, k + offset, m, "green" if tag == "insert" else style)
            table.add_row(*left, *right)
    return table


def _cell(place: Place, index: int, end: int, style: str | None) -> tuple[str, Text]:
    if index >= end:
        return "", Text()
    return str(place.first_line + index), Text(place.lines[index], style=style or "")


def show_lines(stages: list[Stage]) -> None:
    """Per upstream file: its lines in history, ours, and which of our files they are."""
    console = make_console()
    for stage in stages:
        table = Table(
            title=f"{stage.key}, {stage.date}", box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left"
        )
        for name in ("upstream file", "there", "here", "our files"):
            table.add_column(name, justify="right" if name in ("there", "here") else "left", overflow="fold")
        counts = count_lines(stage)
        for count in counts:
            there = "" if count.upstream_lines is None else f"{count.upstream_lines:,}"
            table.add_row(
                count.upstream, there, f"{count.lines:,}", _files(count.files, count.upstream == OURS)
            )
        table.add_section()
        there = f"{sum(count.upstream_lines or 0 for count in counts):,}"
        table.add_row("all", there, f"{sum(count.lines for count in counts):,}", "")
        console.print(table)


def _files(files: dict[str, int], is_ours: bool) -> str:
    if is_ours and len(files) > 6:
        support = sum(lines for path, lines in files.items() if path.startswith("support/"))
        others = ", ".join(path for path in files if not path.startswith("support/"))
        return f"support/ ({support:,}), {others}"
    return ", ".join(files)
