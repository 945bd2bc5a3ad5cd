"""The slots of all sequences of a batch end to end, as FlashInfer wants them, in one Triton launch.

Process: whichever holds the model. Lifetime: called once per step, keeps nothing.

With torch's own operations this takes a dozen launches, which is most of what the host does for a replayed
step. Each program copies a piece of one request's row; where it goes is the sum of the lengths before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch_sizes import cdiv

BLOCK = 1024
SUMMED_AT_ONCE = 128


@triton.jit
def _gather_kv_indices_kernel(
    req_to_token,
    req_pool_indices,
    seq_lens,
    kv_indices,
    stride_row,
    BLOCK: tl.constexpr,
    SUMMED: tl.constexpr,
):
    request = tl.program_id(0)
    start = tl.zeros([SUMMED], dtype=tl.int64)
    for first in range(0, request, SUMMED):
        before = first + tl.arange(0, SUMMED)
        start += tl.load(seq_lens + before, mask=before < request, other=0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < tl.load(seq_lens + request)
    row = tl.load(req_pool_indices + request).to(tl.int64)
    slots = tl.load(req_to_token + row * stride_row + columns, mask=mask, other=0)
    tl.store(kv_indices + tl.sum(start, 0) + columns, slots, mask=mask)


def gather_kv_indices(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    total_num_tokens: int,
    max_seq_len: int,
) -> torch.Tensor:
    """Slots of requests in rows ``req_pool_indices`` ``[bs]`` of ``req_to_token``: ``[total_num_tokens]``, its dtype.

    ``seq_lens`` ``[bs]``, on the device; their sum and maximum on the host.
    """
    kv_indices = req_to_token.new_empty(total_num_tokens)
    grid = (len(seq_lens), cdiv(max_seq_len, BLOCK))
    _gather_kv_indices_kernel[grid](
        req_to_token,
        req_pool_indices,
        seq_lens,
        kv_indices,
        req_to_token.stride(0),
        BLOCK=BLOCK,
        SUMMED=SUMMED_AT_ONCE,
    )
    return kv_indices
