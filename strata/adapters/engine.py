"""One face over the engines of all stages, without sockets or HTTP.

Tests, traces and benches drive a stage through `Engine`; what it holds at any moment is a `Snapshot`, a plain
value that the invariants of DESIGN §5 are functions of (`invariants.py`). Any process; as long as its user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class Event:
    """What one step gave one request: new token ids and, at the end, why it ended.

    ``text`` comes before ``new_ids`` and continues the whole characters of the ids before: a jump-forward put it
    there, and the ids that were generated of it, if any, do not count any more.
    """

    rid: str
    new_ids: list[int]
    finish: dict[str, Any] | None
    meta: dict[str, Any]
    text: str = ""


@dataclass(frozen=True)
class NodeView:
    """One node of the prefix tree. ``parent`` indexes `Snapshot.nodes`; the root is node 0, its parent -1."""

    parent: int
    slots: tuple[int, ...]
    locks: int


@dataclass(frozen=True)
class RequestView:
    """A running request: the slot of each cached token; the first ``shared`` belong to the tree too."""

    rid: str
    row: int
    slots: tuple[int, ...]
    shared: int
    node: int
    """The node whose path this request locks."""


@dataclass(frozen=True)
class Snapshot:
    """All that an engine holds between two steps."""

    size: int
    """Slots that a request could ever get, padding excluded."""
    free_slots: frozenset[int]
    nodes: tuple[NodeView, ...]
    requests: tuple[RequestView, ...]
    evictable: int
    protected: int
    rows_used: int
    waiting: tuple[str, ...]
    counts: Mapping[int, int] | None = None
    """References of every slot that is not free, in stages whose pool counts them (v0.1)."""
    ratio: float | None = None
    """new_token_ratio, in stages that adapt it (v0.2 on)."""

    @property
    def free(self) -> int:
        return len(self.free_slots)

    @property
    def tree_slots(self) -> list[int]:
        return [slot for node in self.nodes for slot in node.slots]

    @property
    def request_slots(self) -> list[int]:
        """Slots that belong to one request alone, over all running requests."""
        return [slot for request in self.requests for slot in request.slots[request.shared :]]

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(request.rid for request in self.requests)

    def path(self, node: int) -> list[int]:
        """Node indices from ``node`` up to the root, the root left out."""
        indices = []
        while node > 0:
            indices.append(node)
            node = self.nodes[node].parent
        return indices


class Engine(Protocol):
    """An engine in this process. ``step`` runs exactly one forward, or none where there is nothing to do."""

    @property
    def runner(self) -> Any:
        """The stage's ModelRunner, for observers that wrap its ``forward``."""
        ...

    @property
    def step_timer(self) -> Any:
        """The stage's StepTimer, for benches: ``enabled``, ``seconds`` by phase, ``reset()``."""
        ...

    @property
    def counters(self) -> Mapping[str, int | float]:
        """The stage's EngineStats: ``decode_steps``, ``prefill_tokens``, ``retractions`` and the rest."""
        ...

    def set_decode_run(self, forwards: int | None) -> None:
        """From now on a `step` may hold so many decode forwards; None: as many as in this stage's server."""
        ...

    def add(
        self,
        ids: Sequence[int],
        params: Mapping[str, Any] | None = None,
        *,
        stream: bool = False,
        rid: str | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> str:
        """Queue a prompt for the next step; ``params`` are the fields of ``sampling_params``.

        ``fields`` are further fields of the request itself, in the stage's own names.
        """
        ...

    def step(self) -> list[Event]: ...

    def abort(self, rid: str) -> None:
        """Forget a request, at the start of the next step."""
        ...

    def flush(self) -> None:
        """Empty the prefix tree, at the start of the next step."""
        ...

    def state(self) -> Snapshot: ...

    def force(self, what: Literal["oom", "retract"]) -> None:
        """Make the next step run out of memory: ``retract`` lacks one slot, ``oom`` has none at all."""
        ...


def drain(engine: Engine, max_steps: int = 100_000) -> list[Event]:
    """Step until nothing waits and nothing runs; all events in order."""
    events: list[Event] = []
    for _ in range(max_steps):
        events += engine.step()
        state = engine.state()
        if not state.requests and not state.waiting:
            return events
    raise TimeoutError(f"engine still busy after {max_steps} steps: {engine.state().running}")


def outputs(events: Sequence[Event]) -> dict[str, list[int]]:
    """The whole output of each request in ``events``, by rid."""
    result: dict[str, list[int]] = {}
    for event in events:
        result.setdefault(event.rid, []).extend(event.new_ids)
    return result
