"""RMSNorm as one Triton launch, with or without the residual add before it.

Process: whichever holds the model. Lifetime: called twice per layer, keeps nothing.

Root mean square normalisation (Zhang and Sennrich, arXiv:1910.07467): ``y = x / sqrt(mean(x²) + eps) * w``.
Written in eager torch it is half a dozen launches and as many trips through memory; here one program holds
a whole row in registers. The variance is taken in float32 whatever the dtype; the normalised row is rounded
to the dtype before the weight multiplies it, as the models were trained.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch_sizes import next_power_of_2


@triton.jit
def _rmsnorm_kernel(
    x,
    residual,
    weight,
    out,
    stride_x,
    stride_residual,
    stride_out,
    hidden_size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden_size
    dtype = out.dtype.element_ty
    values = tl.load(x + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        carried = tl.load(residual + row * stride_residual + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = (values + carried).to(dtype)
        tl.store(residual + row * stride_residual + columns, rounded, mask=mask)
        values = rounded.to(tl.float32)
    variance = tl.sum(values * values, 0) / hidden_size
    normed = (values * tl.rsqrt(variance + eps)).to(dtype).to(tl.float32)
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + columns, (normed * scale).to(dtype), mask=mask)


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows, hidden_size = x.shape
    out = torch.empty_like(x)
    block = next_power_of_2(hidden_size)
    carried = x if residual is None else residual
    _rmsnorm_kernel[(rows,)](
        x,
        carried,
        weight,
        out,
        x.stride(0),
        carried.stride(0),
        out.stride(0),
        hidden_size,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return out


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The normalised rows of ``x`` ``[tokens, hidden]``, a new tensor; ``weight`` is ``[hidden]``."""
    return _launch(x, None, weight, eps)


def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds ``x`` ``[tokens, hidden]`` to ``residual`` in place, returns (the sum normalised, ``residual``)."""
    return _launch(x, residual, weight, eps), residual
