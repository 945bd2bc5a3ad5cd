"""Attention when part of each prompt is cached: the prefix out of the pool, then the new tokens causally.

Process: whichever holds the model. Lifetime: one call per layer of an EXTEND forward.

Each program owns one head and one block of a request's new tokens. Its first loop walks the cached prefix,
whose K and V lie in pool slots named by the request's row of ``req_to_token``; every new token sees all of
it, so there is no causal mask. Its second loop walks the new tokens, contiguous in ``k_extend`` and
``v_extend``, up to the diagonal. Both feed one online softmax (``flash_attention.py``), so that prefix and
new part never have to be merged. The new tokens are read from the projection's output, not from the pool:
the kernel does not care whether they have been stored there yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .flash_attention import (
    PER_REQUEST,
    Blocks,
    attend_causally,
    check_rows,
    dot_dtype,
    load_rows,
    padded_head_dim,
    prefill_blocks,
    score_scale,
    softmax_step,
)
from .launch_sizes import cdiv


@triton.jit(do_not_specialize_on_alignment=PER_REQUEST)
def _extend_kernel(
    q,
    k,
    v,
    o,
    k_buffer,
    v_buffer,
    req_to_token,
    req_pool_indices,
    seq_lens,
    prefix_lens,
    extend_start_loc,
    scale,
    stride_q,
    stride_k,
    stride_v,
    stride_o,
    stride_slot,
    stride_row,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
):
    head = tl.program_id(0)
    request = tl.program_id(1)
    # The last rows see the most keys: they start first, so that no long program is left alone at the end.
    first_row = (tl.num_programs(2) - 1 - tl.program_id(2)) * BLOCK_M
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    length = tl.load(seq_lens + request).to(tl.int32) - prefix
    if first_row >= length:
        return
    first_token = tl.load(extend_start_loc + request).to(tl.int64)
    slot_row = req_to_token + tl.load(req_pool_indices + request).to(tl.int64) * stride_row
    rows = (first_row + tl.arange(0, BLOCK_M)).to(tl.int64)
    kv_offset = head // GROUP * HEAD_DIM

    q_base = q + first_token * stride_q + head * HEAD_DIM
    q_tile = load_rows(q_base, rows, stride_q, rows < length, True, HEAD_DIM, BLOCK_D).to(DOT)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    for start in range(0, prefix, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        cached = positions < prefix
        # 64 bits: a large pool has more than 2**31 elements, so slot * stride would wrap.
        slots = tl.load(slot_row + positions, mask=cached, other=0).to(tl.int64)
        k_tile = load_rows(k_buffer + kv_offset, slots, stride_slot, cached, True, HEAD_DIM, BLOCK_D).to(DOT)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        scores = tl.where(cached[None, :], scores, float("-inf"))
        v_tile = load_rows(v_buffer + kv_offset, slots, stride_slot, cached, True, HEAD_DIM, BLOCK_D).to(DOT)
        acc, row_max, row_sum = softmax_step(scores, v_tile, acc, row_max, row_sum)

    acc, row_max, row_sum = attend_causally(
        q_tile,
        acc,
        row_max,
        row_sum,
        k + first_token * stride_k + kv_offset,
        v + first_token * stride_v + kv_offset,
        stride_k,
        stride_v,
        first_row,
        length,
        scale,
        HEAD_DIM,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        DOT,
    )
    dims = tl.arange(0, BLOCK_D)
    o_base = o + first_token * stride_o + head * HEAD_DIM
    mask = (rows < length)[:, None] & (dims < HEAD_DIM)[None, :]
    out = (acc / row_sum[:, None]).to(o.dtype.element_ty)
    tl.store(o_base + rows[:, None] * stride_o + dims[None, :], out, mask=mask)


def extend_attention_fwd(
    q_extend: torch.Tensor,
    k_extend: torch.Tensor,
    v_extend: torch.Tensor,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    max_extend_len: int,
    blocks: Blocks | None = None,
) -> None:
    """Attention of every request's new tokens over its cached prefix and themselves, written to ``o_extend``.

    - ``q_extend``, ``o_extend``: ``[tokens, heads, head_dim]``; ``k_extend``, ``v_extend``:
      ``[tokens, kv_heads, head_dim]``: the new tokens of all requests, end to end. A row's heads are
      contiguous, while rows may be apart (a slice of the fused QKV projection will do).
    - ``k_buffer``, ``v_buffer``: ``[slots, kv_heads, head_dim]``, one layer of the pool, equal strides.
    - ``req_to_token``: int32 or int64 ``[rows, columns]``; ``req_pool_indices``: ``[bs]``, each request's row.
    - ``seq_lens``, ``prefix_lens``: ``[bs]``, tokens in all (new ones included) and cached tokens, which may
      be 0; ``extend_start_loc``: ``[bs]``, where a request's new tokens begin.
    - ``max_extend_len``: the largest of ``seq_lens - prefix_lens``, known on the host: it sizes the grid.
    - ``blocks``: tiles to use in place of the measured ones, for benches and tests.
    """
    check_rows(q_extend=q_extend, k_extend=k_extend, v_extend=v_extend, o_extend=o_extend)
    check_rows(k_buffer=k_buffer, v_buffer=v_buffer)
    heads, head_dim = q_extend.shape[1:]
    tiles = blocks or prefill_blocks(q_extend, max_extend_len)
    grid = (heads, seq_lens.shape[0], cdiv(max_extend_len, tiles.block_m))
    _extend_kernel[grid](
        q_extend,
        k_extend,
        v_extend,
        o_extend,
        k_buffer,
        v_buffer,
        req_to_token,
        req_pool_indices,
        seq_lens,
        prefix_lens,
        extend_start_loc,
        score_scale(head_dim),
        q_extend.stride(0),
        k_extend.stride(0),
        v_extend.stride(0),
        o_extend.stride(0),
        k_buffer.stride(0),
        req_to_token.stride(0),
        GROUP=heads // k_extend.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=padded_head_dim(head_dim),
        DOT=dot_dtype(k_extend),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
