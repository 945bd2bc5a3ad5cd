"""Rotary position embedding of queries and keys, in place, and the storing of K and V, as one Triton launch.

Process: whichever holds the model. Lifetime: called once per layer, keeps nothing.

RoPE (Su et al., arXiv:2104.09864) turns each pair of a head's components by an angle proportional to the
token's position; the pairs here are ``(i, i + head_dim / 2)``, as Llama's checkpoints have them. The cosines
and sines of all positions are a table made at start-up. One program turns one token: all its query heads,
then all its key heads, with one read of the table's row. It then has the token's K at hand and puts it into
the pool, with V, where a kernel of its own would have to be launched and read K again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch_sizes import next_power_of_2


@triton.jit
def _turn(
    base,
    copy,
    cosines,
    sines,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    COPY: tl.constexpr,
):
    head = tl.arange(0, BLOCK_H)[:, None]
    pair = tl.arange(0, BLOCK_P)[None, :]
    mask = (head < HEADS) & (pair < HALF)
    first = head * 2 * HALF + pair
    x = tl.load(base + first, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(base + first + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = base.dtype.element_ty
    turned_x = (x * cosines - y * sines).to(dtype)
    turned_y = (y * cosines + x * sines).to(dtype)
    tl.store(base + first, turned_x, mask=mask)
    tl.store(base + first + HALF, turned_y, mask=mask)
    if COPY:
        tl.store(copy + first, turned_x, mask=mask)
        tl.store(copy + first + HALF, turned_y, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions", "out_cache_loc"])  # any offset of a staging buffer
def _rotary_store_kernel(
    q,
    k,
    v,
    cos_sin,
    positions,
    k_buffer,
    v_buffer,
    out_cache_loc,
    stride_q,
    stride_k,
    stride_v,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_P)
    table_row = cos_sin + tl.load(positions + token).to(tl.int64) * (2 * HALF)
    cosines = tl.load(table_row + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    sines = tl.load(table_row + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    # 64 bits: a large pool has more than 2**31 elements, so slot * width would wrap.
    width = K_HEADS * 2 * HALF
    slot = tl.load(out_cache_loc + token).to(tl.int64) * width
    _turn(q + token * stride_q, q, cosines, sines, Q_HEADS, HALF, BLOCK_Q, BLOCK_P, False)
    _turn(k + token * stride_k, k_buffer + slot, cosines, sines, K_HEADS, HALF, BLOCK_K, BLOCK_P, True)
    columns = tl.arange(0, BLOCK_V)
    values = tl.load(v + token * stride_v + columns, mask=columns < width)
    tl.store(v_buffer + slot + columns, values, mask=columns < width)


def rotate_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    out_cache_loc: torch.Tensor,
) -> None:
    """Turns ``q`` and ``k`` in place; then ``k_buffer[out_cache_loc] = k``, and the same for V.

    - ``q``: ``[tokens, heads, head_dim]``; ``k``, ``v``: ``[tokens, kv_heads, head_dim]``. A token's row is
      contiguous, while rows may be apart (slices of the fused QKV projection will do).
    - ``cos_sin``: contiguous ``[max_positions, head_dim]``, cosines in the first half of a row, sines in the
      second; ``positions``: int32 or int64 ``[tokens]``.
    - ``k_buffer``, ``v_buffer``: contiguous ``[slots, kv_heads, head_dim]`` of k's dtype; ``out_cache_loc``:
      int32 or int64 ``[tokens]``, no slot twice.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    _rotary_store_kernel[(tokens,)](
        q,
        k,
        v,
        cos_sin,
        positions,
        k_buffer,
        v_buffer,
        out_cache_loc,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        Q_HEADS=heads,
        K_HEADS=kv_heads,
        HALF=head_dim // 2,
        BLOCK_Q=next_power_of_2(heads),
        BLOCK_K=next_power_of_2(kv_heads),
        BLOCK_P=next_power_of_2(head_dim // 2),
        BLOCK_V=next_power_of_2(kv_heads * head_dim),
        num_warps=4,
    )
