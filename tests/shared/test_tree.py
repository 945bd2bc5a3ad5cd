"""The prefix tree of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stages.v0_1_genesis.managers.router.radix_cache import RadixCache as GenesisTree

from .contracts.tree import Key, Tree, TreeContract


class GenesisTreeFace:
    def __init__(self, disable: bool) -> None:
        self.tree = GenesisTree(torch.device("cpu"), torch.int64, disable)

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
                found.append((key, child.value.tolist(), child.ref_counter))
                stack.append((child, key))
        return found


class TestGenesisTree(TreeContract):
    stage = "v0.1"

    @staticmethod
    def make_tree(disable: bool = False) -> Tree:
        return GenesisTreeFace(disable)
