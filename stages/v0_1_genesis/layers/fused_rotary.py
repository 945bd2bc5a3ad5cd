"""Rotary position embedding of queries and keys, in place, as one Triton launch.

Process: whichever holds the model. Lifetime: called once per layer, keeps nothing.

RoPE (Su et al., arXiv:2104.09864) turns each pair of a head's components by an angle proportional to the
token's position; the pairs here are ``(i, i + rotary_dim / 2)``, as Llama's checkpoints have them. The
cosines and sines of all positions are a table made at start-up. One program turns one token: all its query
heads, then all its key heads, with one read of the table's row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _turn(
    base,
    cosines,
    sines,
    heads,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    head = tl.arange(0, BLOCK_H)[:, None]
    pair = tl.arange(0, BLOCK_P)[None, :]
    mask = (head < heads) & (pair < HALF)
    first = base + head * HEAD_DIM + pair
    x = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(first + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = base.dtype.element_ty
    tl.store(first, (x * cosines - y * sines).to(dtype), mask=mask)
    tl.store(first + HALF, (y * cosines + x * sines).to(dtype), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions"])  # any offset of a staging buffer
def _rotary_kernel(
    q,
    k,
    cos_sin,
    positions,
    stride_q,
    stride_k,
    stride_table,
    q_heads,
    k_heads,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_P)
    table_row = cos_sin + tl.load(positions + token).to(tl.int64) * stride_table
    cosines = tl.load(table_row + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    sines = tl.load(table_row + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    _turn(q + token * stride_q, cosines, sines, q_heads, HEAD_DIM, HALF, BLOCK_Q, BLOCK_P)
    _turn(k + token * stride_k, cosines, sines, k_heads, HEAD_DIM, HALF, BLOCK_K, BLOCK_P)


def rotary_embedding(
    q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, head_dim: int
) -> None:
    """Turns ``q`` ``[tokens, heads * head_dim]`` and ``k`` ``[tokens, kv_heads * head_dim]`` in place.

    A row is contiguous, while rows may be apart (slices of the fused QKV projection will do). ``cos_sin`` is
    ``[max_positions, rotary_dim]``, cosines in the first half of a row and sines in the second; components
    of a head beyond ``rotary_dim`` stay as they are. ``positions``: int32 or int64 ``[tokens]``.
    """
    half = cos_sin.shape[1] // 2
    q_heads, k_heads = q.shape[1] // head_dim, k.shape[1] // head_dim
    _rotary_kernel[(q.shape[0],)](
        q,
        k,
        cos_sin,
        positions,
        q.stride(0),
        k.stride(0),
        cos_sin.stride(0),
        q_heads,
        k_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_Q=triton.next_power_of_2(q_heads),
        BLOCK_K=triton.next_power_of_2(k_heads),
        BLOCK_P=triton.next_power_of_2(half),
        num_warps=4,
    )
