"""The prefix tree of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stages.v0_1_genesis.managers.router.radix_cache import RadixCache as GenesisTree
from stages.v0_2_cudagraph.managers.controller.radix_cache import RadixCache as CudaGraphTree
from stages.v0_2_cudagraph.memory_pool import ReqToTokenPool, TokenToKVPool

from .contracts.tree import Key, Tree, TreeContract

CPU = torch.device("cpu")


class GenesisTreeFace:
    tree: Any

    def __init__(self, disable: bool) -> None:
        self.tree = GenesisTree(CPU, torch.int64, disable)

    def match(self, key: Sequence[int]) -> tuple[list[int], Any]:
        slots, node = self.tree.match_prefix(list(key))
        return slots.tolist(), node

    def insert(self, key: Sequence[int], slots: Sequence[int]) -> int:
        return self.tree.insert(list(key), torch.tensor(list(slots), dtype=torch.int64))

    def evict(self, num_tokens: int) -> list[int]:
        freed: list[int] = []

        def callback(slots: torch.Tensor) -> int:
            freed.extend(slots.tolist())
            return slots.numel()

        self.tree.evict(num_tokens, callback)
        return freed

    def lock(self, node: Any) -> int:
        return self.tree.inc_ref_counter(node)

    def unlock(self, node: Any) -> int:
        return self.tree.dec_ref_counter(node)

    def locks(self, node: Any) -> int:
        return int(node.ref_counter)

    def evictable(self) -> int:
        return self.tree.evictable_size()

    def protected(self) -> int:
        return self.tree.protected_size()

    def total(self) -> int:
        return self.tree.total_size()

    def nodes(self) -> list[tuple[Key, list[int], int]]:
        found: list[tuple[Key, list[int], int]] = []
        stack: list[tuple[Any, Key]] = [(self.tree.root_node, ())]
        while stack:
            parent, prefix = stack.pop()
            for child in parent.children.values():
                key = (*prefix, *child.key)
                found.append((key, child.value.tolist(), self.locks(child)))
                stack.append((child, key))
        return found


class TestGenesisTree(TreeContract):
    stage = "v0.1"

    @staticmethod
    def make_tree(disable: bool = False) -> Tree:
        return GenesisTreeFace(disable)


class CudaGraphTreeFace(GenesisTreeFace):
    def __init__(self, disable: bool) -> None:
        rows, slots = ReqToTokenPool(1, 8, CPU), TokenToKVPool(8, torch.float32, 1, 4, 1, CPU)
        self.tree = CudaGraphTree(rows, slots, disable)

    def lock(self, node: Any) -> int:
        return int(self.tree.inc_lock_ref(node))

    def unlock(self, node: Any) -> int:
        return int(self.tree.dec_lock_ref(node))

    def locks(self, node: Any) -> int:
        return int(node.lock_ref)


class TestCudaGraphTree(TreeContract):
    stage = "v0.2"

    @staticmethod
    def make_tree(disable: bool = False) -> Tree:
        return CudaGraphTreeFace(disable)
