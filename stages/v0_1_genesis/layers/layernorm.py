"""RMSNorm, with the residual addition that goes before it. Part of the model of each rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if torch.cuda.is_available():
    from .fused_layernorm import fused_add_rmsnorm, rmsnorm


class RMSNorm(nn.Module):
    """Divides each row by its root mean square and scales it by ``weight`` ``[hidden_size]``."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=False)

    def load_weight(self, param: nn.Parameter, shard_id: int, loaded: Tensor) -> None:
        param.copy_(loaded)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Norm of ``x + residual`` and that sum, the next residual: both ``[tokens, hidden_size]``.

        The sum may overwrite ``residual``.
        """
        if x.is_cuda:
            if residual is None:
                return rmsnorm(x, self.weight, self.eps), x
            return fused_add_rmsnorm(x, residual, self.weight, self.eps)
        residual = x if residual is None else x + residual
        return F.rms_norm(residual, self.weight.shape, self.weight, self.eps), residual
