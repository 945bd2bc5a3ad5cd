"""Prefill attention when nothing is cached: causal, over requests of different lengths laid end to end.

Process: whichever holds the model. Lifetime: one call per layer of a PREFILL forward.

FlashAttention-2 (Dao, arXiv:2307.08691) without padding: the batch is one flat row of tokens, and a program
finds its request's piece through ``b_start_loc`` and ``b_seq_len``. Each program owns one head and one block
of query rows, walks the key blocks up to the diagonal with an online softmax (``flash_attention.py``) and
writes its rows once. Grouped heads (GQA) read the K and V of head ``head // group``.
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
)
from .launch_sizes import cdiv


@triton.jit(do_not_specialize_on_alignment=PER_REQUEST)
def _context_kernel(
    q,
    k,
    v,
    o,
    b_start_loc,
    b_seq_len,
    scale,
    stride_q,
    stride_k,
    stride_v,
    stride_o,
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
    length = tl.load(b_seq_len + request).to(tl.int32)
    if first_row >= length:
        return
    first_token = tl.load(b_start_loc + request).to(tl.int64)
    rows = (first_row + tl.arange(0, BLOCK_M)).to(tl.int64)
    kv_head = head // GROUP

    q_base = q + first_token * stride_q + head * HEAD_DIM
    q_tile = load_rows(q_base, rows, stride_q, rows < length, True, HEAD_DIM, BLOCK_D).to(DOT)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc, row_max, row_sum = attend_causally(
        q_tile,
        acc,
        row_max,
        row_sum,
        k + first_token * stride_k + kv_head * HEAD_DIM,
        v + first_token * stride_v + kv_head * HEAD_DIM,
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


def context_attention_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    b_start_loc: torch.Tensor,
    b_seq_len: torch.Tensor,
    max_input_len: int,
    blocks: Blocks | None = None,
) -> None:
    """Causal attention of every request over its own tokens, written to ``o``.

    - ``q``, ``o``: ``[tokens, heads, head_dim]``; ``k``, ``v``: ``[tokens, kv_heads, head_dim]``, where
      ``heads`` is a multiple of ``kv_heads``; float32, float16 or bfloat16; a row's heads are contiguous,
      while rows may be apart (a slice of the fused QKV projection will do).
    - ``b_start_loc``, ``b_seq_len``: int32 or int64 ``[bs]``, each request's first token and token count.
    - ``max_input_len``: the largest of ``b_seq_len``, known on the host, since it sizes the grid.
    - ``blocks``: tiles to use in place of the measured ones, for benches and tests.
    """
    check_rows(q=q, k=k, v=v, o=o)
    heads, head_dim = q.shape[1:]
    tiles = blocks or prefill_blocks(q, max_input_len)
    grid = (heads, b_seq_len.shape[0], cdiv(max_input_len, tiles.block_m))
    _context_kernel[grid](
        q,
        k,
        v,
        o,
        b_start_loc,
        b_seq_len,
        score_scale(head_dim),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        o.stride(0),
        GROUP=heads // k.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=padded_head_dim(head_dim),
        DOT=dot_dtype(k),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
