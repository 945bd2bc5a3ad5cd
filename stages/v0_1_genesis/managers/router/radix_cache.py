"""The radix tree of finished requests: edges carry token ids, nodes own the slots of those tokens.

Owned by the ModelRpcServer of each rank and alive as long as it; `reset` empties it. A running request
locks the path of its prefix, and eviction takes unlocked leaves, least recently used first (INV-LOCK).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Key = tuple[int, ...]


class TreeNode:
    """The tokens on the edge from ``parent`` to this node, and their slots ``value`` ``[len(key)]``."""

    def __init__(self, parent: TreeNode | None, key: Key, value: Tensor) -> None:
        self.parent = parent
        self.key = key
        self.value = value
        self.children: dict[Key, TreeNode] = {}
        self.ref_counter = 0
        self.last_access_time = 0

    def __lt__(self, other: TreeNode) -> bool:
        return self.last_access_time < other.last_access_time


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading elements in which ``a`` and ``b`` agree.

    Compares whole slices, doubling then halving their length: tuples compare in C, a loop would not.
    """
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    agreed, step = 0, 1
    while agreed + step <= limit and a[agreed : agreed + step] == b[agreed : agreed + step]:
        agreed += step
        step *= 2
    while step:
        if agreed + step <= limit and a[agreed : agreed + step] == b[agreed : agreed + step]:
            agreed += step
        step //= 2
    return agreed


class RadixCache:
    """Prefix cache with split at divergence, locks along a path, and LRU eviction of leaves.

    Args:
        device: where slot indices live.
        index_dtype: their dtype.
        disable: keep nothing; every match is empty and every insert owns nothing.
    """

    def __init__(self, device: torch.device, index_dtype: torch.dtype, disable: bool = False) -> None:
        self.disable = disable
        self.no_slots = torch.empty(0, dtype=index_dtype, device=device)
        self.reset()

    def reset(self) -> None:
        """Forget everything. The caller gives the slots back to their pool."""
        self.root_node = TreeNode(None, (), self.no_slots)
        self.root_node.ref_counter = 1  # never evicted
        self._clock = itertools.count(1)
        self._evictable_size = 0
        self._protected_size = 0

    def match_prefix(self, key: Sequence[int]) -> tuple[Tensor, TreeNode]:
        """Longest cached prefix of ``key``: its slots ``[matched]`` and the node where it ends.

        An edge that agrees only in part is split there, so that the node holds exactly what matched.
        """
        key = tuple(key)
        node, slots, matched = self.root_node, [self.no_slots], 0
        while step := self._descend(node, key[matched:]):
            node, num_agreed = step
            matched += num_agreed
            slots.append(node.value)
        return torch.cat(slots), node

    def insert(self, key: Sequence[int], value: Tensor) -> int:
        """Own ``key``'s slots ``value`` ``[len(key)]``, but for the prefix that the tree has already.

        Returns how many leading slots of ``value`` stay the caller's: that prefix, or all when disabled.
        """
        if self.disable:
            return len(key)
        key = tuple(key)
        node, matched = self.root_node, 0
        while step := self._descend(node, key[matched:]):
            node, num_agreed = step
            matched += num_agreed
        if matched < len(key):
            leaf = TreeNode(node, key[matched:], value[matched:].clone())
            self._touch(leaf)
            node.children[leaf.key] = leaf
            self._evictable_size += len(leaf.key)
        return matched

    def evict(self, num_tokens: int, evict_callback: Callable[[Tensor], int]) -> None:
        """Drop unlocked leaves, oldest first, until ``evict_callback(slots)`` has freed ``num_tokens``."""
        leaves = [node for node in self._nodes() if not node.children and node.ref_counter == 0]
        heapq.heapify(leaves)
        num_evicted = 0
        while num_evicted < num_tokens and leaves:
            leaf = heapq.heappop(leaves)
            num_evicted += evict_callback(leaf.value)
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.key]
            self._evictable_size -= len(leaf.key)
            if not parent.children and parent.ref_counter == 0:
                heapq.heappush(leaves, parent)

    def inc_ref_counter(self, node: TreeNode) -> int:
        """Lock the path from ``node`` to the root; return the change of `evictable_size` (at most 0)."""
        delta = 0
        while node.parent is not None:
            if node.ref_counter == 0:
                delta -= len(node.key)
            node.ref_counter += 1
            node = node.parent
        self._move_to_protected(-delta)
        return delta

    def dec_ref_counter(self, node: TreeNode) -> int:
        """Undo one `inc_ref_counter` of the same node; return the change of `evictable_size` (at least 0)."""
        delta = 0
        while node.parent is not None:
            if node.ref_counter == 0:
                raise RuntimeError(f"unlock of a node that is not locked: {len(node.key)} tokens")
            node.ref_counter -= 1
            if node.ref_counter == 0:
                delta += len(node.key)
            node = node.parent
        self._move_to_protected(-delta)
        return delta

    def evictable_size(self) -> int:
        """Tokens in unlocked nodes."""
        return self._evictable_size

    def protected_size(self) -> int:
        """Tokens in locked nodes."""
        return self._protected_size

    def total_size(self) -> int:
        return sum(len(node.key) for node in self._nodes())

    def pretty_print(self) -> None:
        """Print one line a node: token count, lock count, first tokens; children indented."""
        stack = [(self.root_node, 0)]
        while stack:
            node, depth = stack.pop()
            print(f"{'  ' * depth}{len(node.key)} tokens, locked {node.ref_counter}x: {list(node.key[:10])}")
            stack.extend((child, depth + 1) for child in node.children.values())

    def _descend(self, node: TreeNode, key: Key) -> tuple[TreeNode, int] | None:
        """The child of ``node`` that agrees with the start of ``key``, split if only in part, and how far."""
        if not key:
            return None
        # Children are keyed by their whole edge: finding the one that agrees means looking at each.
        for child_key, child in node.children.items():
            if child_key[0] != key[0]:
                continue
            num_agreed = common_prefix_len(child_key, key)
            if num_agreed < len(child_key):
                child = self._split(child, num_agreed)
            self._touch(child)
            return child, num_agreed
        return None

    def _split(self, child: TreeNode, split_len: int) -> TreeNode:
        """Cut ``child``'s edge after ``split_len`` tokens; return the new upper node, locked as the child is."""
        parent = child.parent
        assert parent is not None
        upper = TreeNode(parent, child.key[:split_len], child.value[:split_len])
        upper.ref_counter = child.ref_counter
        upper.last_access_time = child.last_access_time
        del parent.children[child.key]
        parent.children[upper.key] = upper
        child.parent, child.key, child.value = upper, child.key[split_len:], child.value[split_len:]
        upper.children[child.key] = child
        return upper

    def _touch(self, node: TreeNode) -> None:
        node.last_access_time = next(self._clock)

    def _move_to_protected(self, num_tokens: int) -> None:
        self._evictable_size -= num_tokens
        self._protected_size += num_tokens

    def _nodes(self) -> list[TreeNode]:
        """Every node but the root, collected without recursion: trees can be deeper than Python's stack."""
        nodes: list[TreeNode] = []
        stack = [self.root_node]
        while stack:
            children = stack.pop().children.values()
            nodes.extend(children)
            stack.extend(children)
        return nodes
