"""Linear layers on the CPU with weights laid out once for the products of decoding: few rows, every weight.

A packed weight is a tensor in an opaque layout that oneDNN chose for its kernels; it replaces the plain one,
so it costs no memory. It saves the repacking which a plain matrix product of a few rows does on every call:
a decode step of 8 to 32 requests gets up to twice as fast. The ops are private to torch, so `can_pack`
tries them once per dtype, and everything falls back to ``F.linear``.

A small float32 weight stays plain, with its columns contiguous: `F.linear` then multiplies two matrices as
they lie. That reads the weight as fast for one row, and is a third to a half faster for 16 to 32. A packed
one is a third slower for one row than that, so there is a plain copy for it where memory allows.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .host_memory import available_host_memory

MIN_FLOAT32_ELEMENTS = 1 << 20
"""Smaller float32 weights are not packed: one row times a plain one reads it up to twice as fast."""

FREE_BEYOND_COPIES = 4 << 30
"""Bytes of memory that the copies for one row leave free: they make one request faster, nothing possible."""


def pack(weight: Tensor) -> Tensor:
    """``weight`` ``[out, in]`` in the layout that serves `linear` best; itself where there is no better one."""
    if weight.device.type != "cpu":
        return weight
    if weight.dtype == torch.float32 and weight.numel() < MIN_FLOAT32_ELEMENTS:
        return columns_contiguous(weight)
    if not can_pack(weight.dtype):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach())


def copy_for_one_row(weight: Tensor) -> Tensor | None:
    """A copy of ``weight`` ``[out, in]`` that is faster for one row than what `pack` makes of it.

    None where `pack` leaves the weight plain, or where little memory is left.
    """
    is_packed = weight.numel() >= MIN_FLOAT32_ELEMENTS and can_pack(weight.dtype)
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not is_packed:
        return None
    if available_host_memory() < FREE_BEYOND_COPIES + weight.nbytes:
        return None
    return columns_contiguous(weight)


def columns_contiguous(weight: Tensor) -> Tensor:
    """A copy of ``weight`` ``[out, in]`` in which a column's elements follow each other."""
    return weight.detach().t().contiguous().t()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, one_row: Tensor | None = None) -> Tensor:
    """``x`` ``[tokens, in]`` times ``weight`` ``[out, in]``, packed or not, plus ``bias``: ``[tokens, out]``.

    ``one_row``: the weight's `copy_for_one_row`, if there is one.
    """
    if one_row is not None and len(x) == 1:
        return F.linear(x, one_row, bias)
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch on this machine packs weights of ``dtype`` and multiplies with them rightly."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 16, generator=generator).to(dtype)
    x = torch.randn(3, 16, generator=generator).to(dtype)
    try:
        product = linear(x, torch.ops.mkldnn._reorder_linear_weight(weight))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    return torch.allclose(product.float(), F.linear(x, weight).float(), atol=tolerance, rtol=tolerance)
