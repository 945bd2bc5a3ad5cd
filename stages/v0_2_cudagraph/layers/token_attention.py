"""Decode attention: one new token per request against everything it has in the pool, in two stages.

Process: whichever holds the model. Lifetime: one call per layer of a DECODE forward; the scratch dies with it.

Decoding reads every cached K and V once and computes next to nothing with them, so all that counts is to
keep the memory busy. Two things see to that:

- *Grouped heads.* A program owns one KV head and all query heads that share it, as the rows of one small
  matrix product: K and V are read once per KV head, not once per query head.
- *Split sequences* (flash-decoding: Dao, Haziza, Massa and Sizov 2023). A batch of 1 has no more programs
  than KV heads, too few for a GPU, so a sequence is cut into splits of ``split_len`` tokens. **Stage 1**
  gives each split a program of its own, which leaves a softmax-weighted mean of the split's values and the
  logarithm of its softmax sum. **Stage 2** weighs a request's splits by those logarithms and adds them up:
  exact, since softmax over a union is the mean of the parts weighted by their sums.

``split_len`` follows from the batch's total tokens, so that the programs fill the GPU a few times over,
however long the requests are and however unlike. When it covers the longest request, stage 1 writes the
answer itself and stage 2 is not launched: at short context a launch costs more than it would save.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .flash_attention import (
    PER_REQUEST,
    check_rows,
    dot_dtype,
    load_rows,
    padded_head_dim,
    score_scale,
    softmax_step,
)
from .launch_sizes import cdiv, next_power_of_2

SPLITS_PER_STEP = 16
"""Splits that stage 2 loads at once: their latencies overlap."""


class DecodeBlocks(NamedTuple):
    """How decode cuts its work: keys per tile, warps, loads in flight, programs wanted per multiprocessor."""

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_split_len: int


@triton.jit(do_not_specialize_on_alignment=PER_REQUEST)
def _split_kernel(
    q,
    k_buffer,
    v_buffer,
    out,
    log_sums,
    req_to_token,
    req_pool_indices,
    start_loc,
    seq_lens,
    scale,
    split_len,
    stride_q,
    stride_slot,
    stride_row,
    stride_out,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    DOT: tl.constexpr,
):
    # KV heads vary fastest: programs that run together read the same tokens' neighbouring heads.
    kv_head = tl.program_id(0)
    request = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(seq_lens + request).to(tl.int32)
    begin = split * split_len
    if begin >= length:
        return
    end = tl.minimum(begin + split_len, length)
    slot_row = req_to_token + tl.load(req_pool_indices + request).to(tl.int64) * stride_row
    members = tl.arange(0, BLOCK_H)
    heads = kv_head * GROUP + members
    is_head = members < GROUP
    k_base = k_buffer + kv_head * HEAD_DIM
    v_base = v_buffer + kv_head * HEAD_DIM

    q_base = q + request.to(tl.int64) * stride_q
    q_tile = load_rows(q_base, heads, HEAD_DIM, is_head, True, HEAD_DIM, BLOCK_D).to(DOT)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_H], tl.float32)
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        cached = positions < end
        # 64 bits: a large pool has more than 2**31 elements, so slot * stride would wrap.
        slots = tl.load(slot_row + positions, mask=cached, other=0).to(tl.int64)
        k_tile = load_rows(k_base, slots, stride_slot, cached, True, HEAD_DIM, BLOCK_D).to(DOT)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        scores = tl.where(cached[None, :], scores, float("-inf"))
        v_tile = load_rows(v_base, slots, stride_slot, cached, True, HEAD_DIM, BLOCK_D).to(DOT)
        acc, row_max, row_sum = softmax_step(scores, v_tile, acc, row_max, row_sum)

    row = request.to(tl.int64)
    if not ONE_SPLIT:
        row += tl.load(start_loc + request).to(tl.int64) // split_len + split
        log_pointers = log_sums + row * (tl.num_programs(0) * GROUP) + heads
        tl.store(log_pointers, row_max + tl.log2(row_sum), mask=is_head)
    dims = tl.arange(0, BLOCK_D)
    mean = (acc / row_sum[:, None]).to(out.dtype.element_ty)
    out_pointers = out + row * stride_out + heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_pointers, mean, mask=is_head[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize_on_alignment=PER_REQUEST)
def _merge_kernel(
    means,
    log_sums,
    o,
    start_loc,
    seq_lens,
    split_len,
    stride_o,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(0)
    splits = tl.cdiv(tl.load(seq_lens + request).to(tl.int32), split_len)
    first_row = tl.load(start_loc + request).to(tl.int64) // split_len + request
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    top = float("-inf")
    total = 0.0
    for start in range(0, splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        rows = (first_row + split) * heads + head
        log_sum = tl.load(log_sums + rows, mask=split < splits, other=float("-inf"))
        tile = load_rows(means, rows, HEAD_DIM, split < splits, True, HEAD_DIM, BLOCK_D)
        new_top = tl.maximum(top, tl.max(log_sum, 0))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(log_sum - new_top)
        acc = acc * shrink + tl.sum(tile * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = new_top
    pointers = o + request * stride_o + head * HEAD_DIM + dims
    tl.store(pointers, (acc / total).to(o.dtype.element_ty), mask=dims < HEAD_DIM)


@cache
def decode_blocks(head_dim: int, dtype: torch.dtype) -> DecodeBlocks:
    """The measured tiles: 16 KiB of keys, so that several loads fit any GPU (float32: 8, to stay in registers).

    The slots are loaded first and K and V through them, so two of ``num_stages`` go to each tile in flight.
    """
    tile_bytes = 8192 if dtype == torch.float32 else 16384
    block_n = min(64, max(16, tile_bytes // (padded_head_dim(head_dim) * dtype.itemsize)))
    return DecodeBlocks(block_n, num_warps=4, num_stages=3, programs_per_sm=4, min_split_len=256)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def choose_split_len(total_num_tokens: int, kv_heads: int, device: torch.device, blocks: DecodeBlocks) -> int:
    """Tokens per split, a multiple of ``block_n``: so many that all splits make about ``programs_per_sm``
    programs per multiprocessor, but never so few that stage 2 would cost more than the splitting saves."""
    programs = _multiprocessors(device) * blocks.programs_per_sm
    wanted = cdiv(total_num_tokens * kv_heads, programs)
    return cdiv(max(wanted, blocks.min_split_len), blocks.block_n) * blocks.block_n


def token_attention_fwd(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    o: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    total_num_tokens: int,
    blocks: DecodeBlocks | None = None,
) -> None:
    """Attention of each request's newest token over all its tokens in the pool, written to ``o``.

    - ``q``, ``o``: ``[bs, heads, head_dim]``; float32, float16 or bfloat16; rows may be apart.
    - ``k_buffer``, ``v_buffer``: ``[slots, kv_heads, head_dim]``, one layer of the pool, equal strides; the
      newest token is already stored there.
    - ``req_to_token``: int32 or int64 ``[rows, columns]``; ``req_pool_indices``: ``[bs]``, each request's row.
    - ``seq_lens``: ``[bs]``, each at least 1; ``start_loc``: ``[bs]``, their running sum, from 0.
    - ``max_seq_len``, ``total_num_tokens``: their maximum and sum, or more, known on the host: they choose
      the splits and size grid and scratch. Frozen at their largest, the call can be captured in a graph.
    - ``blocks``: tiles to use in place of the measured ones, for benches and tests.

    Scratch: a request of ``n`` tokens has at most ``n // split_len + 1`` splits, so split ``s`` of request
    ``b`` gets row ``start_loc[b] // split_len + b + s`` with no two alike: ``total // split_len + bs`` rows
    of ``[heads, head_dim]`` float32, a few MB at any batch size.
    """
    check_rows(q=q, o=o, k_buffer=k_buffer, v_buffer=v_buffer)
    bs, heads, head_dim = q.shape
    kv_heads = k_buffer.shape[1]
    group = heads // kv_heads
    tiles = blocks or decode_blocks(head_dim, k_buffer.dtype)
    block_d = padded_head_dim(head_dim)
    split_len = choose_split_len(total_num_tokens, kv_heads, q.device, tiles)
    max_splits = cdiv(max_seq_len, split_len)
    one_split = max_splits == 1
    means, log_sums = o, o
    if not one_split:
        rows = total_num_tokens // split_len + bs
        means = torch.empty((rows, heads, head_dim), dtype=torch.float32, device=q.device)
        log_sums = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
    _split_kernel[(kv_heads, bs, max_splits)](
        q,
        k_buffer,
        v_buffer,
        means,
        log_sums,
        req_to_token,
        req_pool_indices,
        start_loc,
        seq_lens,
        score_scale(head_dim),
        split_len,
        q.stride(0),
        k_buffer.stride(0),
        req_to_token.stride(0),
        means.stride(0),
        GROUP=group,
        BLOCK_H=max(16, next_power_of_2(group)),
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_N=tiles.block_n,
        ONE_SPLIT=one_split,
        DOT=dot_dtype(k_buffer),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if not one_split:
        _merge_kernel[(heads, bs)](
            means,
            log_sums,
            o,
            start_loc,
            seq_lens,
            split_len,
            o.stride(0),
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_S=SPLITS_PER_STEP,
            num_warps=2,
        )
