"""Attention in plain torch: the path of the CPU, and the reference that the kernels are tested against.

Extend loops over the requests, whose lengths the host knows; decode is the planned op of
``support/paged_decode.py``. No state; an `ExtendPlan` lives for one step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class ExtendPlan:
    """What all layers of an EXTEND step share, per request.

    ``extend_lens``: new tokens. ``slots[i]`` ``[seq_len]``: where K and V of the whole sequence lie.
    ``masks[i]`` ``[extend_len, seq_len]`` is added to the scores: 0 for what a new token sees, else -inf; None
    where nothing is cached, so that plain causal attention serves, and for one new token, which sees all.
    """

    extend_lens: list[int]
    slots: list[Tensor]
    masks: list[Tensor | None]


def plan_extend(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: list[int],
    prefix_lens: list[int],
    dtype: torch.dtype,
) -> ExtendPlan:
    """Plan a step of requests in rows ``req_pool_indices`` ``[bs]`` of ``req_to_token``; ``dtype``: the queries'."""
    rows = req_to_token.index_select(0, req_pool_indices)
    lens = list(zip(seq_lens, prefix_lens, strict=True))
    return ExtendPlan(
        extend_lens=[seq_len - prefix_len for seq_len, prefix_len in lens],
        slots=[row[:seq_len] for row, seq_len in zip(rows, seq_lens, strict=True)],
        masks=[_extend_mask(seq_len, prefix_len, dtype, rows.device) for seq_len, prefix_len in lens],
    )


def _extend_mask(seq_len: int, prefix_len: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    extend_len = seq_len - prefix_len
    if prefix_len == 0 or extend_len == 1:
        return None
    hidden = torch.full((extend_len, seq_len), -torch.inf, dtype=dtype, device=device)
    return hidden.triu_(prefix_len + 1)


def extend_attention(q: Tensor, k_buffer: Tensor, v_buffer: Tensor, plan: ExtendPlan) -> Tensor:
    """Attention of new tokens, laid end to end, over their whole sequences in the pool.

    ``q`` ``[tokens, heads, head_dim]``, ``k_buffer`` and ``v_buffer`` ``[pool, kv_heads, head_dim]``; returns
    q's shape.
    """
    k_rows, v_rows = k_buffer.flatten(1), v_buffer.flatten(1)
    outputs = []
    for request_q, slots, mask in zip(q.split(plan.extend_lens), plan.slots, plan.masks, strict=True):
        k = F.embedding(slots, k_rows).view(-1, *k_buffer.shape[1:])
        v = F.embedding(slots, v_rows).view(-1, *v_buffer.shape[1:])
        outputs.append(_attend(request_q, k, v, mask))
    return torch.cat(outputs)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """One request, causal unless ``mask`` says otherwise: ``[len, heads, dim]`` -> the same."""
    is_causal = mask is None and len(q) > 1
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=True)
    return o.squeeze(0).transpose(0, 1)
