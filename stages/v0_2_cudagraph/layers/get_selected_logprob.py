"""The log probability of each prompt token under the row of logits before it: a segmented gather.

Process: whichever holds the model. Lifetime: one call per forward whose requests want prompt logprobs.

Row ``t`` of the logits predicts token ``t + 1`` of the same request. The rows of all requests lie end to end,
so a request's last row has nothing to predict: its entry of ``next_ids`` is negative, which is what cuts the
batch into segments. A full ``log_softmax`` would write ``[rows, vocab]`` float32 only to read one number a
row. Here one program per row makes a single pass over the logits with the running maximum and sum of the
online softmax (Milakov and Gimelshein, arXiv:1805.02867), one pair per lane, and gathers the one logit it
wants: ``logit[next_id] - log(sum(exp(logit)))``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_V = 4096


@triton.jit(do_not_specialize_on_alignment=["next_ids"])  # any offset of a staging buffer
def _selected_logprob_kernel(logits, next_ids, out, vocab_size, stride_logits, BLOCK_V: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    next_id = tl.load(next_ids + row).to(tl.int64)
    if next_id < 0:
        tl.store(out + row, 0.0)
        return
    base = logits + row * stride_logits
    offsets = tl.arange(0, BLOCK_V)
    lane_max = tl.full([BLOCK_V], float("-inf"), tl.float32)
    lane_sum = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, vocab_size, BLOCK_V):
        ids = start + offsets
        block = tl.load(base + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(lane_max, block)
        # A lane that has seen only -inf (masked tokens, or none at all) adds nothing: not -inf - -inf.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        lane_sum = lane_sum * tl.exp(lane_max - shift) + tl.exp(block - shift)
        lane_max = new_max
    top = tl.max(lane_max, 0)
    total = tl.sum(lane_sum * tl.exp(lane_max - top), 0)
    chosen = tl.load(base + next_id).to(tl.float32)
    tl.store(out + row, chosen - top - tl.log(total))


def get_selected_logprob(all_logits: torch.Tensor, next_ids: torch.Tensor) -> torch.Tensor:
    """Log probability float32 ``[rows]`` of each row's next token; 0 where there is none.

    ``all_logits``: float32, float16 or bfloat16 ``[rows, vocab]``, a row contiguous. ``next_ids``: int32 or
    int64 ``[rows]``, the token that followed each row, or a negative number at a request's end.
    """
    rows, vocab_size = all_logits.shape
    if all_logits.stride(1) != 1:
        raise ValueError(f"all_logits: want contiguous rows, got strides {all_logits.stride()}")
    out = torch.empty(rows, dtype=torch.float32, device=all_logits.device)
    _selected_logprob_kernel[(rows,)](
        all_logits, next_ids, out, vocab_size, all_logits.stride(0), BLOCK_V=BLOCK_V, num_warps=8
    )
    return out
