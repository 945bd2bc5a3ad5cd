"""The `Engine` face of v0.1: its ModelRpcServer in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.v0_1_genesis.managers import io_struct
from stages.v0_1_genesis.managers.router.model_rpc import NUM_CONTINUE_DECODE_STEPS, ModelRpcServer
from stages.v0_1_genesis.sampling_params import SamplingParams
from stages.v0_1_genesis.server_args import ServerArgs

from .engine import Event
from .in_process import DEFAULTS, InProcessEngine


class GenesisEngine(InProcessEngine):
    """``server_args`` are fields of the stage's ServerArgs; the device is the CPU unless they say else."""

    def __init__(self, model_path: Path, *, tp_rank: int = 0, nccl_port: int = 0, **server_args: Any) -> None:
        args = ServerArgs(model_path=str(model_path), **(DEFAULTS | server_args))
        server = ModelRpcServer(args, tp_rank, nccl_port)
        super().__init__(server, io_struct, SamplingParams, NUM_CONTINUE_DECODE_STEPS)

    def _events(self, output: io_struct.BatchTokenIDOut) -> Iterator[Event]:
        columns = (output.rids, output.output_tokens, output.finish_reason, output.meta_info)
        return (Event(*row) for row in zip(*columns, strict=True))

    def _pool_state(self) -> dict[str, Any]:
        counts = self.server.token_to_kv_pool.mem_state.tolist()
        return {
            "free_slots": frozenset(slot for slot, count in enumerate(counts) if count == 0),
            "counts": {slot: count for slot, count in enumerate(counts) if count != 0},
        }

    def _locks(self, node: Any) -> int:
        return int(node.ref_counter)
