"""The steps that every Triton attention kernel of this stage is made of: gather rows, attend one block, go on.

Process: whichever holds the model. Lifetime: nothing here is kept; these functions are inlined into kernels.

Attention over a long row of keys never needs all scores at once. Milakov and Gimelshein's *online softmax*
(arXiv:1805.02867) keeps three things per query row while key blocks pass by: the largest score so far
``row_max``, the sum ``row_sum`` of ``2 ** (score - row_max)``, and the equally weighted sum ``acc`` of value
rows. When a block brings a larger score, the two sums shrink by ``2 ** (old_max - new_max)``; at the end
``acc / row_sum`` is the exact softmax times V. FlashAttention (Dao et al., arXiv:2205.14135) tiles this so
that a score never leaves the chip. Scores are kept in base 2 (the caller's ``scale`` holds log2 e), because
the hardware's exponential is ``exp2``.

No guard against ``-inf - -inf``: every caller starts with a block in which each row sees at least one key,
so ``row_max`` is finite from the first step on.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch_sizes import next_power_of_2

LOG2_E = 1.4426950408889634

PER_REQUEST = [
    *("b_start_loc", "b_seq_len"),
    *("req_pool_indices", "start_loc", "seq_lens", "prefix_lens", "extend_start_loc"),
]
"""Kernel arguments read one number at a time, and cut out of a step's staging buffer at any offset: specialised,
they would have Triton compile a kernel anew for each combination of alignments, in the middle of serving."""


class Blocks(NamedTuple):
    """How a kernel cuts its work: query rows and keys per tile, warps per program, loads kept in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def score_scale(head_dim: int) -> float:
    """``1 / sqrt(head_dim)``, times log2 e, since the kernels exponentiate in base 2."""
    return head_dim**-0.5 * LOG2_E


@cache
def padded_head_dim(head_dim: int) -> int:
    """``tl.arange`` wants powers of two and ``tl.dot`` at least 16; the kernels mask what lies beyond."""
    if not 1 <= head_dim <= 256:
        raise ValueError(
            f"head_dim {head_dim}: the Triton attention kernels take 1 to 256; use --model-mode torch"
        )
    return max(16, next_power_of_2(head_dim))


def dot_dtype(tensor: torch.Tensor) -> tl.dtype:
    """The dtype whose products the kernels take: the tensor's own, on a GPU.

    Triton's interpreter keeps bfloat16 as raw 16-bit integers, so there the products are of float32.
    """
    if not tensor.is_cuda:
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[tensor.dtype]


def prefill_blocks(tensor: torch.Tensor, max_len: int) -> Blocks:
    """Tiles for the two prefill kernels over ``[tokens, heads, head_dim]``, ``max_len`` new tokens a request.

    64 rows by 64 keys came first or second in every case measured on an H200, short extends included. Larger
    tiles want the shared memory of a data-centre GPU, and rows beyond a short request's end are wasted work.
    float32 products run on the plain cores, fully unrolled: larger tiles than these take minutes to compile.
    """
    head_dim = tensor.shape[2]
    if tensor.dtype == torch.float32:
        return Blocks(32, 16, 4, 1) if head_dim <= 128 else Blocks(16, 16, 4, 1)
    roomy = has_large_shared_memory(tensor.device)
    if head_dim <= 128:
        return Blocks(64, 64, 4, 3 if roomy else 2)
    return Blocks(128, 64, 8, 2) if roomy and max_len > 64 else Blocks(64, 32, 4, 2)


@cache
def has_large_shared_memory(device: torch.device) -> bool:
    """More than the 100 KiB per multiprocessor of consumer GPUs: A100, H100 and later have 164 or 228."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor > 110_000


def check_rows(**tensors: torch.Tensor) -> None:
    """Raises ValueError unless each ``[rows, heads, head_dim]`` tensor has its heads side by side in a row."""
    for name, tensor in tensors.items():
        if tensor.dim() != 3 or tensor.stride()[1:] != (tensor.shape[2], 1):
            raise ValueError(
                f"{name}: want [rows, heads, head_dim] with contiguous rows, "
                f"got shape {tuple(tensor.shape)}, strides {tensor.stride()}"
            )


@triton.jit
def load_rows(
    base, rows, stride, visible, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """``[len(rows), BLOCK_D]`` of the rows ``base + rows * stride``; what is not visible reads as zero.

    The zeros matter (INV-NAN): a weight of 0 times a NaN left in a foreign slot would still be NaN.
    """
    dims = tl.arange(0, BLOCK_D)
    pointers = base + rows[:, None] * stride + dims[None, :]
    if HEAD_DIM != BLOCK_D:
        mask = visible[:, None] & (dims < HEAD_DIM)[None, :]
        tile = tl.load(pointers, mask=mask, other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=visible[:, None], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def softmax_step(scores, values, acc, row_max, row_sum):
    """One block of online softmax: scores ``[M, N]`` float32 in base 2, values ``[N, D]``; returns the new state."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    shrink = tl.exp2(row_max - new_max)
    weights = tl.exp2(scores - new_max[:, None])
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def attend_causally(
    q,
    acc,
    row_max,
    row_sum,
    k,
    v,
    stride_k,
    stride_v,
    first_row,
    length,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
):
    """Lets query rows ``first_row … + BLOCK_M`` of one request's new tokens see the keys up to their own.

    ``k`` and ``v`` point at the request's first new token, in the right head. Key blocks that end before
    ``first_row`` are whole for every row and skip all masks; the few on the diagonal pay for them.
    """
    rows = first_row + tl.arange(0, BLOCK_M)
    offsets = tl.arange(0, BLOCK_N)
    whole = first_row // BLOCK_N * BLOCK_N
    for start in range(0, whole, BLOCK_N):
        keys = (start + offsets).to(tl.int64)
        k_tile = load_rows(k, keys, stride_k, keys < length, False, HEAD_DIM, BLOCK_D).to(DOT)
        scores = tl.dot(q, tl.trans(k_tile), input_precision="ieee") * scale
        v_tile = load_rows(v, keys, stride_v, keys < length, False, HEAD_DIM, BLOCK_D).to(DOT)
        acc, row_max, row_sum = softmax_step(scores, v_tile, acc, row_max, row_sum)
    for start in range(whole, tl.minimum(first_row + BLOCK_M, length), BLOCK_N):
        keys = (start + offsets).to(tl.int64)
        k_tile = load_rows(k, keys, stride_k, keys < length, True, HEAD_DIM, BLOCK_D).to(DOT)
        scores = tl.dot(q, tl.trans(k_tile), input_precision="ieee") * scale
        seen = (keys[None, :] <= rows[:, None]) & (keys < length)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        v_tile = load_rows(v, keys, stride_v, keys < length, True, HEAD_DIM, BLOCK_D).to(DOT)
        acc, row_max, row_sum = softmax_step(scores, v_tile, acc, row_max, row_sum)
    return acc, row_max, row_sum
