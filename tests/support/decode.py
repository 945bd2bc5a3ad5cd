"""A decode step of genesis' real model in static buffers, as a graph runner would hold it."""

from __future__ import annotations

from torch import Tensor

from stages.v0_1_genesis.support import packed_linear


def packed(weight: Tensor) -> Tensor:
    """``weight`` packed, however small, where that is possible."""
    import torch

    if not packed_linear.can_pack(weight.dtype):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight)
