"""What the `Engine` faces of all stages do alike: one engine in this process, stepped one forward at a time."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import msgspec
from torch import Tensor

from .engine import Event, NodeView, RequestView, Snapshot

DEFAULTS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "disable_log_stats": True}
"""Fields of every stage's ServerArgs, unless the maker of an engine says else."""


class InProcessEngine(ABC):
    """A stage's subclass makes the server and says in what its stage differs.

    Args:
        server: the object that owns the step.
        messages: the stage's ``io_struct``.
        params_class: the stage's SamplingParams.
        decode_run: forwards in a row when a run is not limited.
    """

    def __init__(self, server: Any, messages: ModuleType, params_class: Any, decode_run: int) -> None:
        self.server = server
        self.server.num_continue_decode_steps = 1
        self._messages = messages
        self._params_class = params_class
        self._decode_run = decode_run
        self._inbox: list[Any] = []
        self._rids = itertools.count()
        self._forced: Literal["oom", "retract"] | None = None

    @property
    def runner(self) -> Any:
        return self.server.model_runner

    @property
    def step_timer(self) -> Any:
        return self.server.step_timer

    @property
    def counters(self) -> Mapping[str, int | float]:
        return self.server.stats.as_dict()

    def set_decode_run(self, forwards: int | None) -> None:
        self.server.num_continue_decode_steps = forwards or self._decode_run

    def add(
        self,
        ids: Sequence[int],
        params: Mapping[str, Any] | None = None,
        *,
        stream: bool = False,
        rid: str | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> str:
        rid = f"r{next(self._rids)}" if rid is None else rid
        sampling = msgspec.convert(dict(params or {}), self._params_class)
        message = self._messages.TokenizedGenerateReqInput
        self._inbox.append(message(rid, list(ids), sampling, stream, **(fields or {})))
        return rid

    def abort(self, rid: str) -> None:
        self._inbox.append(self._messages.AbortReq(rid))

    def flush(self) -> None:
        self._inbox.append(self._messages.FlushCacheReq(f"flush{next(self._rids)}"))

    def force(self, what: Literal["oom", "retract"]) -> None:
        self._forced = what

    def step(self) -> list[Event]:
        inbox, self._inbox = self._inbox, []
        held = self._hold_slots()
        answers = self.server.exposed_step(inbox)
        if held is not None:
            self.server.token_to_kv_pool.free(held)
        outputs = (answer for answer in answers if isinstance(answer, self._messages.BatchTokenIDOut))
        return [event for output in outputs for event in self._events(output)]

    @abstractmethod
    def _events(self, output: Any) -> Iterator[Event]:
        """What a BatchTokenIDOut says, request by request."""

    @abstractmethod
    def _pool_state(self) -> dict[str, Any]:
        """The Snapshot's ``free_slots``, and what else this stage alone has."""

    @abstractmethod
    def _locks(self, node: Any) -> int:
        """How often a node of the tree is locked."""

    def state(self) -> Snapshot:
        pool, tree, rows = self.server.token_to_kv_pool, self.server.tree_cache, self.server.req_to_token_pool
        nodes, index_of = self._nodes()
        return Snapshot(
            size=pool.size,
            nodes=nodes,
            requests=self._requests(index_of),
            evictable=tree.evictable_size(),
            protected=tree.protected_size(),
            rows_used=rows.size - rows.can_use_mem_size,
            waiting=tuple(req.rid for req in self.server.forward_queue),
            **self._pool_state(),
        )

    def _hold_slots(self) -> Tensor | None:
        """Empty the tree and take free slots away for one step, as if other requests had them."""
        what, self._forced = self._forced, None
        batch = self.server.running_batch
        if what is None or batch.is_empty() or (what == "retract" and len(batch) == 1):
            return None  # the last request is never retracted
        pool, tree = self.server.token_to_kv_pool, self.server.tree_cache
        tree.evict(tree.evictable_size(), pool.free)
        spared = len(batch) - 1 if what == "retract" else 0
        return pool.alloc(max(0, pool.available_size() - spared))

    def _nodes(self) -> tuple[tuple[NodeView, ...], dict[int, int]]:
        """All nodes, parents first, and the index of each by ``id``."""
        root = self.server.tree_cache.root_node
        views, index_of, stack = [NodeView(-1, (), self._locks(root))], {id(root): 0}, [root]
        while stack:
            parent = stack.pop()
            for child in parent.children.values():
                index_of[id(child)] = len(views)
                views.append(NodeView(index_of[id(parent)], tuple(child.value.tolist()), self._locks(child)))
                stack.append(child)
        return tuple(views), index_of

    def _requests(self, index_of: dict[int, int]) -> tuple[RequestView, ...]:
        table = self.server.req_to_token_pool.req_to_token
        return tuple(
            RequestView(
                rid=req.rid,
                row=req.req_pool_idx,
                slots=tuple(table[req.req_pool_idx, : req.num_computed].tolist()),
                shared=len(req.prefix_indices),
                node=index_of[id(req.last_node)],
            )
            for req in self.server.running_batch.reqs
        )
