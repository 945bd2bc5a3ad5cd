"""Writes the new tokens' K and V into their pool slots, both in one Triton launch.

Process: whichever holds the model. Lifetime: called once per layer, keeps nothing.

Two indexed assignments would be four launches in eager torch. One program copies one token: its K row and
its V row, ``kv_heads * head_dim`` numbers each, to the slot that ``out_cache_loc`` names.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch_sizes import next_power_of_2


@triton.jit(do_not_specialize_on_alignment=["out_cache_loc"])  # any offset of a staging buffer
def _store_kv_kernel(
    k,
    v,
    k_buffer,
    v_buffer,
    out_cache_loc,
    stride_k,
    stride_v,
    stride_slot,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    # 64 bits: a large pool has more than 2**31 elements, so slot * stride would wrap.
    slot = tl.load(out_cache_loc + token).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    k_row = tl.load(k + token * stride_k + columns, mask=mask)
    v_row = tl.load(v + token * stride_v + columns, mask=mask)
    tl.store(k_buffer + slot * stride_slot + columns, k_row, mask=mask)
    tl.store(v_buffer + slot * stride_slot + columns, v_row, mask=mask)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    out_cache_loc: torch.Tensor,
) -> None:
    """``k_buffer[out_cache_loc] = k`` and the same for V.

    ``k``, ``v``: ``[tokens, kv_heads, head_dim]`` with contiguous rows, which may be apart; ``k_buffer``,
    ``v_buffer``: contiguous ``[slots, kv_heads, head_dim]`` of the same dtype; ``out_cache_loc``: int32 or
    int64 ``[tokens]``, no slot twice.
    """
    width = k_buffer.stride(0)
    _store_kv_kernel[(k.shape[0],)](
        k,
        v,
        k_buffer,
        v_buffer,
        out_cache_loc,
        k.stride(0),
        v.stride(0),
        k_buffer.stride(0),
        WIDTH=width,
        BLOCK=next_power_of_2(width),
        num_warps=4,
    )
