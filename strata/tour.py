"""Asks every stage the same question, one after the other, and shows what each said and how fast."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .client import Answer, ChatClient, timed_answer
from .errors import UserError
from .serve import running_server
from .stages import Stage, existing_stages

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Stop:
    """One stage's part of the tour: the first answer of a fresh server, and the same question once more."""

    stage: Stage
    start_s: float
    first: Answer
    again: Answer


def run_tour(question: str, max_tokens: int) -> None:
    """Visit each stage of this checkout in turn, then print one table."""
    from .console import make_console

    console = make_console()
    stages = existing_stages()
    if not stages:
        raise UserError("this checkout has no stage", "Clone the repository anew")
    console.print(f"Question: {question}", markup=False, soft_wrap=True)
    stops = list[Stop]()
    for stage in stages:
        console.print(f"Starting {stage.key} ({stage.date}) …")
        stops.append(_visit(stage, question, max_tokens))
    console.print(_table(stops))


def _visit(stage: Stage, question: str, max_tokens: int) -> Stop:
    started = time.monotonic()
    with (
        running_server(stage.key) as server,
        closing(ChatClient(server.base_url, max_tokens=max_tokens)) as client,
    ):
        ready_s = time.monotonic() - started
        return Stop(stage, ready_s, timed_answer(client, question), timed_answer(client, question))


def _table(stops: list[Stop]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="The same question, asked twice of each stage; the second time its prompt is cached")
    for name in ("stage", "date", "answer"):
        table.add_column(name, overflow="fold")
    for name in ("start s", "TTFT ms", "again ms", "tokens", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for stop in stops:
        table.add_row(
            stop.stage.key,
            stop.stage.date,
            Text(stop.first.text.strip()),
            f"{stop.start_s:.1f}",
            f"{1000 * stop.first.ttft_s:.0f}",
            f"{1000 * stop.again.ttft_s:.0f}",
            str(stop.first.tokens),
            f"{stop.first.tokens_per_s:.1f}",
        )
    return table
