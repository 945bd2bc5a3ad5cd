"""The two-level token pool: a row of slots per request, and the K and V that the slots hold.

Owned by the ModelRunner of each rank and alive as long as it. Page size is one token, so that the radix
tree can share any prefix. A slot in use has one owner, the tree or one request (INV-POOL); slot 0 belongs
to the padding of captured graphs, never to a request (INV-PAD).
"""

from __future__ import annotations

import torch
from torch import Tensor

CONTEXT_SLACK = 8
"""Columns beyond the context length in a request's row (history's margin)."""

PREFETCH_CHUNK = 512
"""Free slots found by one search at least; the surplus serves the next allocations."""


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
    """Second level: each slot's K and V in every layer, and which slots are free.

    ``k_buffer`` and ``v_buffer`` have one tensor ``[size + 1, head_num, head_dim]`` a layer; slot 0 is the
    padding's. They start as zeros: gathers may read a slot that nobody wrote, and garbage could be NaN, which
    no mask removes (INV-NAN).
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
        self.mem_state = torch.ones(size + 1, dtype=torch.bool, device=device)
        shape = (size + 1, head_num, head_dim)
        self.k_buffer = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layer_num)]
        self.v_buffer = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layer_num)]
        self.num_free: int
        self.prefetch_buffer: Tensor
        self.clear()

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.k_buffer[layer_id]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.v_buffer[layer_id]

    def available_size(self) -> int:
        return self.num_free + self.prefetch_buffer.numel()

    @property
    def used_size(self) -> int:
        return self.size - self.available_size()

    def alloc(self, need_size: int) -> Tensor | None:
        """Take ``need_size`` free slots: ``[need_size]``, or None if there are too few.

        Most allocations are a slice of the prefetched indices; one in many searches the whole state, on the
        device and with a synchronisation.
        """
        if need_size > self.available_size():
            return None
        lacking = need_size - self.prefetch_buffer.numel()
        if lacking > 0:
            found = torch.nonzero(self.mem_state).squeeze(1)[: max(lacking, PREFETCH_CHUNK)]
            self.mem_state[found] = False
            self.num_free -= found.numel()
            self.prefetch_buffer = torch.cat((self.prefetch_buffer, found.to(self.index_dtype)))
        slots = self.prefetch_buffer[:need_size]
        self.prefetch_buffer = self.prefetch_buffer[need_size:]
        return slots

    def free(self, slots: Tensor) -> int:
        """Give back ``slots`` (all distinct, all in use); return how many."""
        self.mem_state[slots] = True
        self.num_free += slots.numel()
        return slots.numel()

    def clear(self) -> None:
        self.prefetch_buffer = torch.empty(0, dtype=self.index_dtype, device=self.mem_state.device)
        self.mem_state.fill_(True)
        self.mem_state[0] = False
        self.num_free = self.size
