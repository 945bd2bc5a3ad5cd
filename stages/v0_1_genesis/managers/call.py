"""One HTTP request's prompts in flight: their outputs so far, and the wait for more.

A `Call` lives as long as its HTTP request and belongs to the event loop of main.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..support.http_errors import ApiError


@dataclass(slots=True, eq=False)
class ReqState:
    """The output of one prompt so far; ``index`` is its place in its call."""

    index: int
    rid: str
    call: Call
    text: str = ""
    meta_info: dict[str, Any] | None = None
    finish_reason: dict[str, Any] | None = None
    is_changed: bool = False


class Call:
    """One HTTP request's prompts in flight, and what wakes the coroutine that waits for them."""

    def __init__(self, rids: Sequence[str], stream: bool) -> None:
        self.stream = stream
        self.states = [ReqState(index, rid, self) for index, rid in enumerate(rids)]
        self._num_unfinished = len(self.states)
        self._changed: list[ReqState] = []
        self._event = asyncio.Event()
        self._error: ApiError | None = None

    def receive(
        self, state: ReqState, text: str, meta_info: dict[str, Any], reason: dict[str, Any] | None
    ) -> None:
        """Take in one more piece of a prompt's output."""
        state.text += text
        state.meta_info = meta_info
        state.finish_reason = reason
        if not state.is_changed:
            state.is_changed = True
            self._changed.append(state)
        if reason is not None:
            self._num_unfinished -= 1
        if self.stream or not self._num_unfinished:
            self._event.set()

    def fail(self, error: ApiError) -> None:
        """Wake who waits with an error instead of an output."""
        self._error = error
        self._event.set()

    async def updates(self) -> AsyncIterator[list[ReqState]]:
        """Prompts whose output has grown, until all have ended; without ``stream`` once, at the end."""
        while True:
            await self._event.wait()
            self._event.clear()
            if self._error is not None:
                raise self._error
            changed, self._changed = self._changed, []
            for state in changed:
                state.is_changed = False
            yield changed
            if not self._num_unfinished:
                return

    async def results(self) -> list[ReqState]:
        """Wait until every prompt has ended; the states in the order of the prompts."""
        async for _ in self.updates():
            pass
        return self.states
