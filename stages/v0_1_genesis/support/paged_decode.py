"""Decode attention on the CPU: planned once per step on the host, run once per layer by one registered op.

`plan` turns the requests' rows of the token table into a rectangle of slots and a mask; the op
``strata::paged_decode`` gathers K and V through it and calls torch's attention. A plan lives for one step.
Being one opaque op with fixed inputs, it can stand inside a captured graph, with the plan replaced before
each replay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class DecodePlan:
    """Where each request's K and V lie, padded to the longest.

    ``slots`` ``[bs * max_len]`` index the pool, ``mask`` ``[bs, 1, 1, max_len]`` is added to the scores: 0 or
    -inf. Columns beyond a request's length repeat the slot of its last token: what the mask hides has been
    written by the request itself, so it is finite (-inf + NaN would be NaN: INV-NAN).
    """

    slots: Tensor
    mask: Tensor


def plan(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, max_len: int, dtype: torch.dtype
) -> DecodePlan:
    """Plan a step of requests in rows ``req_pool_indices`` ``[bs]`` with ``seq_lens`` ``[bs]`` tokens each.

    ``max_len`` is the largest of ``seq_lens``, known on the host; ``dtype`` that of the queries.
    """
    columns = torch.arange(max_len, device=seq_lens.device)
    last = (seq_lens - 1).unsqueeze(1)
    slots = req_to_token[req_pool_indices.unsqueeze(1), torch.minimum(columns, last)]
    mask = torch.zeros(slots.shape, dtype=dtype, device=slots.device).masked_fill_(columns > last, -torch.inf)
    return DecodePlan(slots.flatten(), mask[:, None, None, :])


def _paged_decode(q: Tensor, k_buffer: Tensor, v_buffer: Tensor, slots: Tensor, mask: Tensor) -> Tensor:
    """Attention of one query per request over its tokens in the pool.

    ``q`` ``[bs, heads, head_dim]``, ``k_buffer`` and ``v_buffer`` ``[pool, kv_heads, head_dim]``, ``slots`` and
    ``mask`` as in `DecodePlan`; returns ``[bs, heads, head_dim]``.
    """
    bs, heads, head_dim = q.shape
    kv_heads = k_buffer.shape[1]
    # A row of the flat pool is one memcpy; indexing the 3-D tensor is several times slower.
    k = k_buffer.flatten(1).index_select(0, slots).view(bs, -1, kv_heads, head_dim).transpose(1, 2)
    v = v_buffer.flatten(1).index_select(0, slots).view(bs, -1, kv_heads, head_dim).transpose(1, 2)
    # The query heads that share a KV head are rows of one attention problem, so K and V are read once.
    q = q.reshape(bs, kv_heads, heads // kv_heads, head_dim)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return o.reshape(bs, heads, head_dim)


def _register() -> torch.library.Library:
    """Define the op once in a process, also where several stages are loaded: their copies are the same."""
    library = torch.library.Library("strata", "FRAGMENT")
    if not hasattr(torch.ops.strata, "paged_decode"):
        library.define(
            "paged_decode(Tensor q, Tensor k_buffer, Tensor v_buffer, Tensor slots, Tensor mask) -> Tensor"
        )
        library.impl("paged_decode", _paged_decode, "CompositeExplicitAutograd")
        library.impl("paged_decode", lambda q, *_: torch.empty_like(q), "Meta")
    return library


_LIBRARY = _register()


def paged_decode(q: Tensor, k_buffer: Tensor, v_buffer: Tensor, step_plan: DecodePlan) -> Tensor:
    """Run the planned attention for one layer: see `_paged_decode` for the shapes."""
    return torch.ops.strata.paged_decode.default(q, k_buffer, v_buffer, step_plan.slots, step_plan.mask)
