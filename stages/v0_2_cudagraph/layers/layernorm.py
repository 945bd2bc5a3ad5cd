"""RMSNorm, with the residual addition that goes before it. Part of the model of each rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

if torch.cuda.is_available():
    from .fused_layernorm import fused_add_rmsnorm, rmsnorm


class RMSNorm(nn.Module):
    """Divides each row by its root mean square and scales it by ``weight`` ``[hidden_size]``."""

    eps_row: Tensor

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("eps_row", torch.full((1,), eps, dtype=torch.float32), persistent=False)
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
        return rms_norm(residual, self.weight, self.eps_row), residual


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """Norm of the rows of ``x`` ``[tokens, hidden_size]``, its scale in float32; ``eps`` is float32 ``[1]``.

    Five ops, where ``F.rms_norm`` falls apart into nine on the CPU: a decode step has two norms a layer.
    """
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_()
    return (x * scale).to(x.dtype).mul_(weight)
