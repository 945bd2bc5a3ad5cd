"""A decode step of genesis' real model in static buffers, as a graph runner would hold it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.v0_1_genesis.layers.logits_processor import LogitsProcessorOutput
from stages.v0_1_genesis.managers.router.infer_batch import ForwardMode
from stages.v0_1_genesis.managers.router.model_runner import InputMetadata, ModelRunner
from stages.v0_1_genesis.model_config import ModelConfig
from stages.v0_1_genesis.server_args import ServerArgs
from stages.v0_1_genesis.support import paged_decode
from stages.v0_1_genesis.support.packed_linear import can_pack

POOL_SIZE = 512


def model_runner(folder: Path, dtype: str = "float32") -> ModelRunner:
    """A runner with random K and V in its pool, and every row of its table full of different slots but 0,
    which is the padding's."""
    args = ServerArgs(model_path=str(folder), device="cpu", dtype=dtype, max_total_tokens=POOL_SIZE)  # type: ignore[arg-type]
    runner = ModelRunner(ModelConfig(str(folder)), args, tp_rank=0, nccl_port=0)
    for buffer in (*runner.token_to_kv_pool.k_buffer, *runner.token_to_kv_pool.v_buffer):
        buffer.normal_()
    table = runner.req_to_token_pool.req_to_token
    slots = torch.stack([1 + torch.randperm(POOL_SIZE - 1) for _ in range(len(table))])
    table[:, : POOL_SIZE - 1] = slots[:, : table.shape[1]].to(table.dtype)
    return runner


class StaticDecode:
    """Static inputs of a decode step of ``bs`` requests, and the step itself."""

    def __init__(self, runner: ModelRunner, bs: int) -> None:
        self.runner, self.bs = runner, bs
        self.input_ids = torch.zeros(bs, dtype=torch.int64)
        self.positions = torch.zeros(bs, dtype=torch.int64)
        self.slots = torch.zeros(bs, dtype=torch.int64)
        self.metadata = InputMetadata(
            forward_mode=ForwardMode.DECODE,
            attention="torch",
            batch_size=bs,
            total_num_tokens=bs,
            max_seq_len=1,
            req_pool_indices=torch.zeros(bs, dtype=torch.int64),
            seq_lens=torch.ones(bs, dtype=torch.int64),
            req_to_token=runner.req_to_token_pool.req_to_token,
            token_to_kv_pool=runner.token_to_kv_pool,
            out_cache_loc=self.slots,
            out_cache_cont_start=None,
            out_cache_cont_end=None,
            seq_lens_cpu=[1] * bs,
            flashinfer=None,
        )
        self.metadata.decode_plan = self._plan(torch.arange(bs), [1] * bs)

    def _plan(self, rows: Tensor, seq_lens: list[int]) -> paged_decode.DecodePlan:
        return paged_decode.plan(self.metadata.req_to_token, rows, seq_lens, self.runner.dtype)

    def fill(self, max_len: int = 24) -> None:
        """Other tokens of other requests with other lengths, each stored where its request's table says."""
        rows = torch.randperm(len(self.metadata.req_to_token))[: self.bs]
        seq_lens = torch.randint(1, max_len + 1, (self.bs,))
        self.set(torch.randint(self.runner.model_config.vocab_size, (self.bs,)), rows, seq_lens)

    def set(self, input_ids: Tensor, rows: Tensor, seq_lens: Tensor) -> None:
        """The given requests, and padding up to ``bs``: token 0 in slot 0, of length 1 in row 0."""
        num_padded = self.bs - len(input_ids)
        rows, lens = F.pad(rows, (0, num_padded)), F.pad(seq_lens, (0, num_padded), value=1)
        self.input_ids.copy_(F.pad(input_ids, (0, num_padded)))
        self.positions.copy_(lens - 1)
        self.slots.copy_(F.pad(self.metadata.req_to_token[rows, lens - 1][: len(input_ids)], (0, num_padded)))
        self.metadata.decode_plan.replace(self._plan(rows, lens.tolist()))

    def run(self) -> LogitsProcessorOutput:
        return self.runner.model(self.input_ids, self.positions, self.metadata)

    def pool_snapshot(self) -> list[Tensor]:
        pool = self.runner.token_to_kv_pool
        return [buffer.clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]

    def restore(self, snapshot: list[Tensor]) -> None:
        pool = self.runner.token_to_kv_pool
        for buffer, saved in zip((*pool.k_buffer, *pool.v_buffer), snapshot, strict=True):
            buffer.copy_(saved)


def packed(weight: Tensor) -> Tensor:
    """``weight`` in oneDNN's layout, however small, where that is possible."""
    return torch.ops.mkldnn._reorder_linear_weight(weight) if can_pack(weight.dtype) else weight
