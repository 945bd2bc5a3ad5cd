"""The `Engine` face of v0.2: its ModelTpServer in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from stages.v0_2_cudagraph.global_config import global_config
from stages.v0_2_cudagraph.managers import io_struct
from stages.v0_2_cudagraph.managers.controller.tp_worker import ModelTpServer
from stages.v0_2_cudagraph.sampling_params import SamplingParams
from stages.v0_2_cudagraph.server_args import ServerArgs

from .engine import Event
from .in_process import DEFAULTS, InProcessEngine


class CudaGraphEngine(InProcessEngine):
    """``server_args`` are fields of the stage's ServerArgs; the device is the CPU unless they say else."""

    def __init__(self, model_path: Path, *, tp_rank: int = 0, nccl_port: int = 0, **server_args: Any) -> None:
        args = ServerArgs(model_path=str(model_path), **(DEFAULTS | server_args))
        server = ModelTpServer(args, tp_rank, nccl_port)
        super().__init__(server, io_struct, SamplingParams, global_config.num_continue_decode_steps)
        self._logprobs: dict[str, io_struct.Logprobs] = {}

    def _events(self, output: io_struct.BatchTokenIDOut) -> Iterator[Event]:
        """``meta`` has all log probabilities so far, as a client sees them, where a message has the new ones."""
        columns = (output.rids, output.output_tokens, output.finish_reason, output.meta_info)
        rows = zip(*columns, output.decoded_texts, output.logprobs, strict=True)
        for rid, new_ids, finish, meta, text, new in rows:
            if new is not None:
                known = self._logprobs.setdefault(rid, io_struct.Logprobs())
                known.add(new)
                meta |= msgspec.structs.asdict(known)
            if finish is not None:
                self._logprobs.pop(rid, None)
            yield Event(rid, new_ids, finish, meta, text)

    def _pool_state(self) -> dict[str, Any]:
        pool = self.server.token_to_kv_pool
        free = pool.mem_state.nonzero().flatten().tolist() + pool.prefetch_buffer.tolist()
        return {"free_slots": frozenset(free), "ratio": self.server.new_token_ratio}

    def _locks(self, node: Any) -> int:
        return int(node.lock_ref)
