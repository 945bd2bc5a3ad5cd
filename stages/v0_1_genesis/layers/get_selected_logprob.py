"""The log probability of every prompt token under the row before it: a segmented gather.

Process: whichever holds the model. Lifetime: one call per forward whose requests want prompt logprobs.

Row ``t`` of the logits predicts token ``t + 1`` of the same request, so a request of ``n`` new tokens has
``n - 1`` answers and its last row has none. A full ``log_softmax`` would write ``[tokens, vocab]`` float32
only to read one number a row. Here one program per row makes a single pass over the row's logits, keeping
the running maximum and sum of the online softmax (Milakov and Gimelshein, arXiv:1805.02867), and gathers
the one logit it wants: ``logit[target] - log(sum(exp(logit)))``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_V = 4096


@triton.jit
def _selected_logprob_kernel(
    logits, input_ids, start_loc, lens, out, vocab_size, stride_logits, BLOCK_V: tl.constexpr
):
    request = tl.program_id(0)
    position = tl.program_id(1)
    length = tl.load(lens + request).to(tl.int32)
    if position >= length:
        return
    row = tl.load(start_loc + request).to(tl.int64) + position
    if position == length - 1:
        tl.store(out + row, 0.0)
        return
    base = logits + row * stride_logits
    offsets = tl.arange(0, BLOCK_V)
    running_max = tl.full([BLOCK_V], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, vocab_size, BLOCK_V):
        ids = start + offsets
        block = tl.load(base + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(running_max, block)
        # A lane that has seen only -inf (a masked token, or a vocabulary smaller than the block) adds nothing.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        running_sum = running_sum * tl.exp(running_max - shift) + tl.exp(block - shift)
        running_max = new_max
    top = tl.max(running_max, 0)
    total = tl.sum(running_sum * tl.exp(running_max - top), 0)
    target = tl.load(input_ids + row + 1).to(tl.int64)
    chosen = tl.load(base + target).to(tl.float32)
    tl.store(out + row, chosen - top - tl.log(total))


def get_selected_logprob(
    all_logits: torch.Tensor,
    input_ids: torch.Tensor,
    start_loc: torch.Tensor,
    lens: torch.Tensor,
    max_len: int,
) -> torch.Tensor:
    """Log probabilities float32 ``[tokens]``: entry ``t`` is that of token ``t + 1``, 0 at a request's end.

    - ``all_logits``: ``[tokens, vocab]`` float32, float16 or bfloat16, the rows of all requests end to end.
    - ``input_ids``: int32 or int64 ``[tokens]``, the tokens that were fed.
    - ``start_loc``, ``lens``: ``[bs]``, a request's first row and its number of rows.
    - ``max_len``: the largest of ``lens``, known on the host, since it sizes the grid.
    """
    tokens, vocab_size = all_logits.shape
    if all_logits.stride(1) != 1:
        raise ValueError(f"all_logits: want contiguous rows, got strides {all_logits.stride()}")
    out = torch.empty(tokens, dtype=torch.float32, device=all_logits.device)
    _selected_logprob_kernel[(lens.shape[0], max_len)](
        all_logits,
        input_ids,
        start_loc,
        lens,
        out,
        vocab_size,
        all_logits.stride(0),
        BLOCK_V=BLOCK_V,
        num_warps=8,
    )
    return out
