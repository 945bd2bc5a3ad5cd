"""The `Engine` face of v0.2: one ModelTpServer in this process, stepped one forward at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from torch import Tensor

from stages.v0_2_cudagraph.global_config import global_config
from stages.v0_2_cudagraph.managers.controller.tp_worker import ModelTpServer
from stages.v0_2_cudagraph.managers.io_struct import (
    AbortReq,
    BatchTokenIDOut,
    EngineInput,
    FlushCacheReq,
    Logprobs,
    TokenizedGenerateReqInput,
)
from stages.v0_2_cudagraph.sampling_params import SamplingParams
from stages.v0_2_cudagraph.server_args import ServerArgs

from .engine import Event, NodeView, RequestView, Snapshot


class CudaGraphEngine:
    """``server_args`` are fields of the stage's ServerArgs; the device is the CPU unless they say else."""

    def __init__(self, model_path: Path, *, tp_rank: int = 0, nccl_port: int = 0, **server_args: Any) -> None:
        defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "disable_log_stats": True}
        args = ServerArgs(model_path=str(model_path), **(defaults | server_args))
        self.server = ModelTpServer(args, tp_rank, nccl_port)
        self.server.num_continue_decode_steps = 1
        self._inbox: list[EngineInput] = []
        self._rids = itertools.count()
        self._logprobs: dict[str, Logprobs] = {}
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
        self.server.num_continue_decode_steps = forwards or global_config.num_continue_decode_steps

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
        sampling = msgspec.convert(dict(params or {}), SamplingParams)
        self._inbox.append(TokenizedGenerateReqInput(rid, list(ids), sampling, stream, **(fields or {})))
        return rid

    def abort(self, rid: str) -> None:
        self._inbox.append(AbortReq(rid))

    def flush(self) -> None:
        self._inbox.append(FlushCacheReq(f"flush{next(self._rids)}"))

    def force(self, what: Literal["oom", "retract"]) -> None:
        self._forced = what

    def step(self) -> list[Event]:
        inbox, self._inbox = self._inbox, []
        held = self._hold_slots()
        answers = self.server.exposed_step(inbox)
        if held is not None:
            self.server.token_to_kv_pool.free(held)
        return [
            event
            for answer in answers
            if isinstance(answer, BatchTokenIDOut)
            for event in self._events(answer)
        ]

    def _events(self, answer: BatchTokenIDOut) -> Iterator[Event]:
        """``meta`` has all log probabilities so far, as a client sees them, where a message has the new ones."""
        columns = (
            answer.rids,
            answer.output_tokens,
            answer.finish_reason,
            answer.meta_info,
            answer.decoded_texts,
        )
        for (rid, new_ids, finish, meta, text), new in zip(
            zip(*columns, strict=True), answer.logprobs, strict=True
        ):
            if new is not None:
                known = self._logprobs.setdefault(rid, Logprobs())
                known.add(new)
                meta |= msgspec.structs.asdict(known)
            if finish is not None:
                self._logprobs.pop(rid, None)
            yield Event(rid, new_ids, finish, meta, text)

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

    def state(self) -> Snapshot:
        pool, tree = self.server.token_to_kv_pool, self.server.tree_cache
        free = set(pool.mem_state.nonzero().flatten().tolist()) | set(pool.prefetch_buffer.tolist())
        nodes, index_of = self._nodes()
        return Snapshot(
            size=pool.size,
            free_slots=frozenset(free),
            nodes=nodes,
            requests=self._requests(index_of),
            evictable=tree.evictable_size(),
            protected=tree.protected_size(),
            rows_used=self.server.req_to_token_pool.size - self.server.req_to_token_pool.can_use_mem_size,
            waiting=tuple(req.rid for req in self.server.forward_queue),
            ratio=self.server.new_token_ratio,
        )

    def _nodes(self) -> tuple[tuple[NodeView, ...], dict[int, int]]:
        """All nodes, parents first, and the index of each by ``id``."""
        root = self.server.tree_cache.root_node
        views, index_of, stack = [NodeView(-1, (), root.lock_ref)], {id(root): 0}, [root]
        while stack:
            parent = stack.pop()
            for child in parent.children.values():
                index_of[id(child)] = len(views)
                views.append(NodeView(index_of[id(parent)], tuple(child.value.tolist()), child.lock_ref))
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
