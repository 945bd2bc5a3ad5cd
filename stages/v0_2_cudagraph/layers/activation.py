"""SiLU-and-multiply, the activation between Llama's two feed-forward products. No state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if torch.cuda.is_available():
    from .fused_activation import silu_and_mul


class SiluAndMul(nn.Module):
    """The first half of each row goes through SiLU and scales the second half."""

    def forward(self, gate_up: Tensor) -> Tensor:
        """``[tokens, 2 * size]`` -> ``[tokens, size]``."""
        if gate_up.is_cuda:
            return silu_and_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
