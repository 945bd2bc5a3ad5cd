"""The two-level token pool: a row of slots per request, and the K and V that the slots hold.

Owned by the ModelRunner of each rank and alive as long as it. Page size is one token, so that the radix
tree can share any prefix. A slot's reference count is the number of its holders: the tree, and every
running request that reads it (INV-POOL).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

CONTEXT_SLACK = 8
"""Columns beyond the context length in a request's row (history's margin)."""


def index_dtype(device: torch.device) -> torch.dtype:
    """int32 where the attention kernels want it, int64 where torch's own gathers do."""
    return torch.int32 if device.type == "cuda" else torch.int64


class ReqToTokenPool:
    """First level: ``req_to_token[row, position]`` is the slot of a request's token."""

    def __init__(self, size: int, max_context_len: int, device: torch.device) -> None:
        self.size = size
        self.mem_state = torch.ones(size, dtype=torch.bool, device=device)
        self.can_use_mem_size = size
        self.req_to_token = torch.zeros(
            (size, max_context_len + CONTEXT_SLACK), dtype=index_dtype(device), device=device
        )

    def alloc(self, need_size: int) -> Tensor | None:
        """Take ``need_size`` free rows: their indices ``[need_size]``, or None if there are too few."""
        if need_size > self.can_use_mem_size:
            return None
        rows = torch.nonzero(self.mem_state).squeeze(1)[:need_size]
        self.mem_state[rows] = False
        self.can_use_mem_size -= need_size
        return rows.to(self.req_to_token.dtype)

    def free(self, rows: list[int]) -> None:
        self.mem_state[rows] = True
        self.can_use_mem_size += len(rows)

    def clear(self) -> None:
        self.mem_state.fill_(True)
        self.can_use_mem_size = self.size


class TokenToKVPool:
    """Second level: each slot's K and V in every layer, and how many hold the slot.

    ``k_buffer`` and ``v_buffer`` have one tensor ``[size, head_num, head_dim]`` a layer. They start as zeros:
    gathers may read a slot that nobody wrote, and garbage could be NaN, which no mask removes (INV-NAN).
    """

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: torch.device,
    ) -> None:
        self.size = size
        self.index_dtype = index_dtype(device)
        self.mem_state = torch.zeros(size, dtype=torch.int16, device=device)
        self.used_size = 0
        shape = (size, head_num, head_dim)
        self.k_buffer = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layer_num)]
        self.v_buffer = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layer_num)]

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.k_buffer[layer_id]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.v_buffer[layer_id]

    def available_size(self) -> int:
        return self.size - self.used_size

    def alloc(self, need_size: int) -> Tensor | None:
        """Take the first ``need_size`` free slots, one reference each: ``[need_size]``, or None.

        Searching is O(size) on the device, some kernels for every allocation, which is what later stages work
        to avoid. The host does not wait for it: it knows how many there will be.
        """
        if need_size > self.available_size():
            return None
        slots = torch.nonzero_static(self.mem_state == 0, size=need_size).squeeze(1)
        self._take(slots)
        return slots.to(self.index_dtype)

    def alloc_contiguous(self, need_size: int) -> tuple[Tensor, int, int] | None:
        """Like `alloc`, but of neighbouring slots ``[start, end)``, the first that there are; None without any.

        The search is the host's: only worth it where a slice is faster than an index, which is on the CPU.
        """
        taken = np.flatnonzero(self.mem_state.cpu().numpy() != 0)
        edges = np.concatenate(([-1], taken, [self.size]))
        is_gap = np.diff(edges) > need_size  # between an edge and the next lie one fewer
        first = int(is_gap.argmax())
        if not is_gap[first]:
            return None
        start = int(edges[first]) + 1
        slots = torch.arange(start, start + need_size, dtype=self.index_dtype, device=self.mem_state.device)
        self._take(slots)
        return slots, start, start + need_size

    def add_refs(self, slots: Tensor) -> None:
        """Count one holder more for each of ``slots`` (all distinct)."""
        counts = self.mem_state[slots] + 1
        self.mem_state[slots] = counts
        self.used_size += int((counts == 1).sum())

    def free(self, slots: Tensor) -> int:
        """Count one holder less for each of ``slots`` (all distinct); return how many that set free."""
        counts = self.mem_state[slots] - 1
        self.mem_state[slots] = counts
        num_freed = int((counts == 0).sum())
        self.used_size -= num_freed
        return num_freed

    def clear(self) -> None:
        self.mem_state.zero_()
        self.used_size = 0

    def _take(self, slots: Tensor) -> None:
        self.mem_state[slots] = 1
        self.used_size += slots.numel()
