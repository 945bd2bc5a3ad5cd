"""Decode attention on the CPU: planned once per step on the host, run once per layer by one registered op.

`plan` turns the requests' rows of the token table into rectangles of slots, with masks; the op
``strata::paged_decode`` gathers K and V through them and calls torch's attention. A plan lives for one step.
Being one opaque op with fixed inputs, it can stand inside a captured graph: `DecodePlan.replace` puts another
plan into the same tensors before each replay.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_SIZE = 8
"""Requests gathered at once: enough to keep all cores busy, and few enough for K and V to stay in the cache."""


@dataclass
class DecodePlan:
    """Where each request's K and V lie: groups of requests of similar length, each padded to its longest.

    - ``slots`` ``[padded]``: rectangles ``[size, longest]`` of indices into the pool, one group after another.
      Columns beyond a request's length repeat the slot of its last token: what the mask hides there the
      request itself has written, so it is finite (-inf + NaN would be NaN: INV-NAN).
    - ``mask`` ``[padded]``: 0 or -inf, added to the scores.
    - ``order``, ``inverse`` ``[bs]``: the requests in the order of their groups, and back; empty where that is
      the order they are in.
    - ``groups`` ``[groups, 3]``, always on the host: each group's size, its longest request, and the first slot
      of a single request whose slots follow each other, else -1. Its K and V need no gathering.
    """

    slots: Tensor
    mask: Tensor
    order: Tensor
    inverse: Tensor
    groups: Tensor

    def replace(self, other: DecodePlan) -> None:
        """Become ``other`` without becoming other tensors, which a captured graph would not see."""
        for field in fields(self):
            source = getattr(other, field.name)
            getattr(self, field.name).resize_(source.shape).copy_(source)


def plan(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: list[int], dtype: torch.dtype
) -> DecodePlan:
    """Plan a step of requests in rows ``req_pool_indices`` ``[bs]`` with ``seq_lens`` ``[bs]`` tokens each.

    ``dtype`` is that of the queries.
    """
    device = req_to_token.device
    in_order, sizes = group_by_length(seq_lens)
    order = torch.tensor(in_order, device=device)
    rows = req_pool_indices[order].unsqueeze(1)
    last = torch.tensor([seq_lens[i] - 1 for i in in_order], device=device).unsqueeze(1)
    slots, masks, groups, begin = [], [], [], 0
    for size, longest in sizes:
        group = slice(begin, begin + size)
        columns = torch.arange(longest, device=device)
        slots.append(req_to_token[rows[group], torch.minimum(columns, last[group])].flatten())
        mask = torch.zeros((size, longest), dtype=dtype, device=device)
        masks.append(mask.masked_fill_(columns > last[group], -torch.inf).flatten())
        groups.append((size, longest, run_start(slots[-1]) if size == 1 else -1))
        begin += size
    if in_order == list(range(len(in_order))):
        order = order[:0]
    return DecodePlan(torch.cat(slots), torch.cat(masks), order, order.argsort(), torch.tensor(groups))


def run_start(slots: Tensor) -> int:
    """The first of ``slots`` ``[len]`` if each is one more than the slot before it, else -1."""
    first = int(slots[0])
    run = torch.arange(first, first + len(slots), dtype=slots.dtype, device=slots.device)
    return first if torch.equal(slots, run) else -1


def group_by_length(seq_lens: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """The requests from longest to shortest, and how they are cut: (size, longest) of each group.

    No request is padded to more than twice its length, however long others are. One group needs no order.
    """
    order = sorted(range(len(seq_lens)), key=seq_lens.__getitem__, reverse=True)
    groups: list[tuple[int, int]] = []
    for i in order:
        size, longest = groups[-1] if groups else (GROUP_SIZE, 0)
        if size < GROUP_SIZE and longest <= 2 * seq_lens[i]:
            groups[-1] = (size + 1, longest)
        else:
            groups.append((1, seq_lens[i]))
    return (order if len(groups) > 1 else list(range(len(seq_lens)))), groups


def _paged_decode(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    slots: Tensor,
    mask: Tensor,
    order: Tensor,
    inverse: Tensor,
    groups: Tensor,
) -> Tensor:
    """Attention of one query per request over its tokens in the pool.

    ``q`` ``[bs, heads, head_dim]``, ``k_buffer`` and ``v_buffer`` ``[pool, kv_heads, head_dim]``, the rest as in
    `DecodePlan`; returns q's shape.
    """
    bs, heads, head_dim = q.shape
    kv_heads = k_buffer.shape[1]
    # The query heads that share a KV head are rows of one attention problem, so K and V are read once.
    q = q.reshape(bs, kv_heads, heads // kv_heads, head_dim)

    def attend(q: Tensor, slots: Tensor, mask: Tensor, size: int, longest: int, first: int) -> Tensor:
        if first >= 0:
            k, v = (buffer.narrow(0, first, longest).unsqueeze(0) for buffer in (k_buffer, v_buffer))
            return F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2))
        # index_select copies whole rows; plain indexing, which goes value by value, is several times slower.
        k = k_buffer.index_select(0, slots).view(size, longest, kv_heads, head_dim)
        v = v_buffer.index_select(0, slots).view(size, longest, kv_heads, head_dim)
        return F.scaled_dot_product_attention(
            q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask.view(size, 1, 1, longest)
        )

    shapes = groups.tolist()
    if len(shapes) == 1:
        return attend(q, slots, mask, *shapes[0]).reshape(bs, heads, head_dim)
    is_sorted = order.numel() == 0
    sizes, cells = [size for size, *_ in shapes], [size * longest for size, longest, _ in shapes]
    queries = (q if is_sorted else q.index_select(0, order)).split(sizes)
    parts = zip(queries, slots.split(cells), mask.split(cells), shapes, strict=True)
    output = torch.cat([attend(*part, *shape) for *part, shape in parts])
    return (output if is_sorted else output.index_select(0, inverse)).reshape(bs, heads, head_dim)


def _register() -> torch.library.Library:
    """Define the op once in a process, also where several stages are loaded: their copies are the same."""
    library = torch.library.Library("strata", "FRAGMENT")
    if not hasattr(torch.ops.strata, "paged_decode"):
        inputs = ["q", "k_buffer", "v_buffer", *(field.name for field in fields(DecodePlan))]
        library.define(f"paged_decode({', '.join(f'Tensor {name}' for name in inputs)}) -> Tensor")
        library.impl("paged_decode", _paged_decode, "CompositeExplicitAutograd")
        library.impl("paged_decode", lambda q, *_: torch.empty(q.shape, dtype=q.dtype, device="meta"), "Meta")
    return library


_LIBRARY = _register()


def paged_decode(q: Tensor, k_buffer: Tensor, v_buffer: Tensor, step: DecodePlan) -> Tensor:
    """Run the planned attention for one layer: see `_paged_decode` for the shapes."""
    return torch.ops.strata.paged_decode.default(
        q, k_buffer, v_buffer, step.slots, step.mask, step.order, step.inverse, step.groups
    )
