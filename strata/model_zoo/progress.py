"""Shows how far a fetch is: a bar on a terminal, one line per stage elsewhere. Always on stderr."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class FetchProgress:
    """One task bar per stage. ``stage`` opens the next stage, ``update`` moves it; both are cheap to call."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True, highlight=False)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bars.add_task("", visible=False)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def note(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)

    def stage(self, text: str) -> None:
        if self._console.is_terminal:
            self._bars.update(self._task, completed=100)
            self._task = self._bars.add_task(text, total=100)
        else:
            self.note(f"{text} …")

    def update(self, fraction: float, detail: str = "") -> None:
        self._bars.update(self._task, completed=100 * min(1.0, fraction))
        if detail and self._console.is_terminal:
            description = self._bars.tasks[-1].description.split(":")[0]
            self._bars.update(self._task, description=f"{description}: {detail}")
