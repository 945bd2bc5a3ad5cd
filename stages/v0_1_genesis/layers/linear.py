"""Linear layers split over the ranks of tensor parallelism, loaded fused where the model uses them fused.

Part of the model of each rank. A column-parallel layer holds some of the outputs and needs all inputs; a
row-parallel one holds some of the inputs and sums the ranks' partial outputs. In that order they need one
all-reduce for both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..support.packed_linear import copy_for_one_row, linear, pack
from .parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)


class LinearBase(nn.Module):
    """This rank's part of a linear layer: ``weight`` ``[output_size, input_size]`` and maybe ``bias``."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        super().__init__()
        self.tp_rank = get_tensor_model_parallel_rank()
        self.tp_size = get_tensor_model_parallel_world_size()
        self.weight = nn.Parameter(torch.empty(output_size, input_size), requires_grad=False)
        self.one_row: Tensor | None = None
        self.bias = nn.Parameter(torch.empty(output_size), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[tokens, input_size]`` -> ``[tokens, output_size]``."""
        return linear(x, self.weight, self.bias, self.one_row)

    def process_weights_after_loading(self) -> None:
        """Swap the weight for its packed form (CPU); of the plain one, a copy may stay for single rows."""
        self.one_row = copy_for_one_row(self.weight)
        self.weight = nn.Parameter(pack(self.weight), requires_grad=False)


class ColumnParallelLinear(LinearBase):
    """Outputs of several projections of one input, each split over the ranks, computed as one product.

    Args:
        input_size: inputs, the same on every rank.
        output_sizes: outputs of each projection over all ranks.
    """

    def __init__(self, input_size: int, output_sizes: list[int], bias: bool = False) -> None:
        tp_size = get_tensor_model_parallel_world_size()
        self.shard_sizes = [size // tp_size for size in output_sizes]
        super().__init__(input_size, sum(self.shard_sizes), bias)

    def load_weight(self, param: nn.Parameter, shard_id: int, loaded: Tensor) -> None:
        """Copy this rank's rows of projection ``shard_id`` from the checkpoint's whole tensor."""
        size = self.shard_sizes[shard_id]
        begin = sum(self.shard_sizes[:shard_id])
        param[begin : begin + size].copy_(loaded.narrow(0, self._source_rank(shard_id) * size, size))

    def _source_rank(self, shard_id: int) -> int:
        """Which of the checkpoint's equal parts this rank holds."""
        return self.tp_rank


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections in one; KV heads fewer than ranks are held by several ranks each."""

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        total_num_heads: int,
        total_num_kv_heads: int,
        bias: bool = False,
    ) -> None:
        tp_size = get_tensor_model_parallel_world_size()
        self.num_kv_head_replicas = max(1, tp_size // total_num_kv_heads)
        kv_size = total_num_kv_heads * self.num_kv_head_replicas * head_dim
        super().__init__(hidden_size, [total_num_heads * head_dim, kv_size, kv_size], bias)

    def _source_rank(self, shard_id: int) -> int:
        return self.tp_rank if shard_id == 0 else self.tp_rank // self.num_kv_head_replicas


class RowParallelLinear(LinearBase):
    """Inputs split over the ranks; the partial outputs are summed over them."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        super().__init__(input_size // get_tensor_model_parallel_world_size(), output_size, bias)

    def load_weight(self, param: nn.Parameter, shard_id: int, loaded: Tensor) -> None:
        """Copy this rank's columns from the checkpoint's whole tensor."""
        if param.dim() == 1:  # The sum over the ranks must count the bias once.
            param.copy_(loaded) if self.tp_rank == 0 else param.zero_()
        else:
            param.copy_(loaded.narrow(1, self.tp_rank * param.shape[1], param.shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[tokens, input_size / tp]`` -> ``[tokens, output_size]``, equal on every rank."""
        partial_sum = linear(x, self.weight, self.bias, self.one_row)
        return tensor_model_parallel_all_reduce(partial_sum) if self.tp_size > 1 else partial_sum
