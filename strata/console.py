"""The console that tables are printed on."""

from __future__ import annotations

from rich.console import Console

WIDTH_OF_A_FILE = 120


def make_console() -> Console:
    """As wide as the terminal; wide enough for our tables where there is none, as in a pipe or a log."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH_OF_A_FILE)
