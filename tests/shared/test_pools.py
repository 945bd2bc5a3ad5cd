"""The slot pool, the row pool and the K and V buffers of each stage."""

from __future__ import annotations

from typing import Any

import torch

from stages.v0_1_genesis.memory_pool import ReqToTokenPool as GenesisRows
from stages.v0_1_genesis.memory_pool import TokenToKVPool as GenesisSlots
from stages.v0_2_cudagraph.memory_pool import ReqToTokenPool as CudaGraphRows
from stages.v0_2_cudagraph.memory_pool import TokenToKVPool as CudaGraphSlots

from .contracts.pools import BufferContract, RefCountContract, SlotPool, SlotPoolContract

CPU = torch.device("cpu")


def genesis_slots(size: int, heads: int = 1, dim: int = 4, layers: int = 1) -> GenesisSlots:
    return GenesisSlots(size, torch.float32, heads, dim, layers, CPU)


class GenesisSlotFace:
    pool: Any

    def __init__(self, size: int) -> None:
        self.pool = genesis_slots(size)
        self.usable = frozenset(range(size))

    def alloc(self, count: int) -> list[int] | None:
        slots = self.pool.alloc(count)
        return None if slots is None else slots.tolist()

    def free(self, slots: list[int]) -> None:
        assert self.pool.free(torch.tensor(slots, dtype=torch.int64)) == len(slots)

    def available(self) -> int:
        return self.pool.available_size()

    def clear(self) -> None:
        self.pool.clear()


class GenesisRowFace:
    pool: Any

    def __init__(self, size: int) -> None:
        self.pool = GenesisRows(size, 16, CPU)
        self.usable = frozenset(range(size))

    def alloc(self, count: int) -> list[int] | None:
        rows = self.pool.alloc(count)
        return None if rows is None else rows.tolist()

    def free(self, slots: list[int]) -> None:
        self.pool.free(slots)

    def available(self) -> int:
        return self.pool.can_use_mem_size

    def clear(self) -> None:
        self.pool.clear()


class TestGenesisSlots(SlotPoolContract, BufferContract, RefCountContract):
    stage = "v0.1"

    @staticmethod
    def make_pool(size: int) -> SlotPool:
        return GenesisSlotFace(size)

    @staticmethod
    def make_buffers(size: int, heads: int, dim: int, layers: int) -> tuple[list[Any], list[Any]]:
        pool = genesis_slots(size, heads, dim, layers)
        return (
            [pool.get_key_buffer(layer) for layer in range(layers)],
            [pool.get_value_buffer(layer) for layer in range(layers)],
        )

    @staticmethod
    def make_counted(size: int) -> Any:
        return genesis_slots(size)


class TestGenesisRows(SlotPoolContract):
    stage = "v0.1"

    @staticmethod
    def make_pool(size: int) -> SlotPool:
        return GenesisRowFace(size)


def cudagraph_slots(size: int, heads: int = 1, dim: int = 4, layers: int = 1) -> CudaGraphSlots:
    return CudaGraphSlots(size, torch.float32, heads, dim, layers, CPU)


class CudaGraphSlotFace(GenesisSlotFace):
    def __init__(self, size: int) -> None:
        self.pool = cudagraph_slots(size)
        self.usable = frozenset(range(1, size + 1))


class CudaGraphRowFace(GenesisRowFace):
    def __init__(self, size: int) -> None:
        self.pool = CudaGraphRows(size, 16, CPU)
        self.usable = frozenset(range(size))


class TestCudaGraphSlots(SlotPoolContract, BufferContract):
    """Slot 0 is the padding's (INV-PAD), and never given away."""

    stage = "v0.2"

    @staticmethod
    def make_pool(size: int) -> SlotPool:
        return CudaGraphSlotFace(size)

    @staticmethod
    def make_buffers(size: int, heads: int, dim: int, layers: int) -> tuple[list[Any], list[Any]]:
        pool = cudagraph_slots(size, heads, dim, layers)
        return (
            [pool.get_key_buffer(layer) for layer in range(layers)],
            [pool.get_value_buffer(layer) for layer in range(layers)],
        )

    def test_most_allocations_take_prefetched_slots(self) -> None:
        """One search serves many: 512 slots are found at once."""
        pool = cudagraph_slots(2000)
        assert pool.alloc(1) is not None
        assert (pool.prefetch_buffer.numel(), pool.available_size()) == (511, 1999)
        assert pool.alloc(511) is not None
        assert (pool.prefetch_buffer.numel(), pool.available_size()) == (0, 1488)
        assert pool.alloc(700) is not None
        assert (pool.prefetch_buffer.numel(), pool.available_size()) == (0, 788)


class TestCudaGraphRows(SlotPoolContract):
    stage = "v0.2"

    @staticmethod
    def make_pool(size: int) -> SlotPool:
        return CudaGraphRowFace(size)
