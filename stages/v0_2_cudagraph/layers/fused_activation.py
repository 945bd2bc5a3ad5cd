"""``silu(gate) * up`` as one Triton launch over the fused gate-up projection.

Process: whichever holds the model. Lifetime: called once per layer, keeps nothing.

The gated linear unit with SiLU (SwiGLU; Shazeer, arXiv:2002.05202). The projection leaves gate and up side
by side in one row, ``[gate | up]``, so one program reads both halves of a piece of the row and writes the
product; ``silu(g) = g / (1 + exp(-g))`` is taken in float32 and rounded to the dtype before the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch_sizes import cdiv

BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(gate_up, out, stride_in, stride_out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * stride_in + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride_in + width + columns, mask=mask, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * stride_out + columns, (activated * up).to(dtype), mask=mask)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``[tokens, 2 * width]`` to a new ``[tokens, width]`` of the same dtype; a row is contiguous."""
    rows, both = gate_up.shape
    width = both // 2
    out = gate_up.new_empty((rows, width))
    _silu_and_mul_kernel[(rows, cdiv(width, BLOCK))](
        gate_up, out, gate_up.stride(0), out.stride(0), width, BLOCK=BLOCK, num_warps=4
    )
    return out
