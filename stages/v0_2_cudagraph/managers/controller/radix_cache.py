"""The radix tree of cached tokens: edges carry token ids, nodes own the slots of those tokens.

Owned by the ModelTpServer of each rank and alive as long as it; `reset` empties it. A running request
locks the path of its prefix, and eviction takes unlocked leaves, least recently used first (INV-LOCK).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...memory_pool import ReqToTokenPool, TokenToKVPool

Key = tuple[int, ...]


class TreeNode:
    """The tokens on the edge from ``parent`` to this node, and their slots ``value`` ``[len(key)]``."""

    def __init__(self, parent: TreeNode | None, key: Key, value: Tensor) -> None:
        self.parent = parent
        self.key = key
        self.value = value
        self.children: dict[int, TreeNode] = {}
        """By the first token of the child's edge."""
        self.lock_ref = 0
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
        req_to_token_pool, token_to_kv_pool: where `cache_req` finds a request's slots, and frees spare ones.
        disable: keep nothing; every match is empty and every insert owns nothing.
    """

    def __init__(
        self, req_to_token_pool: ReqToTokenPool, token_to_kv_pool: TokenToKVPool, disable: bool = False
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool = token_to_kv_pool
        self.disable = disable
        self.no_slots = req_to_token_pool.req_to_token.new_empty(0)
        self.reset()

    def reset(self) -> None:
        """Forget everything. The caller gives the slots back to their pool."""
        self.root_node = TreeNode(None, (), self.no_slots)
        self.root_node.lock_ref = 1  # never evicted
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
            node.children[leaf.key[0]] = leaf
            self._evictable_size += len(leaf.key)
        return matched

    def cache_req(
        self,
        token_ids: Sequence[int],
        last_uncached_pos: int,
        req_pool_idx: int,
        old_last_node: TreeNode,
        del_in_memory_pool: bool = True,
    ) -> tuple[Tensor, TreeNode]:
        """Hand a request's computed ``token_ids`` to the tree, so that others can share them at once.

        The request's row holds its slots; those from ``last_uncached_pos`` on are its own so far. Where the
        tree has the same tokens already, the request's copies are freed. With ``del_in_memory_pool`` the
        request has ended: its row and its lock go too. Otherwise its row is pointed at the tree's slots and its
        lock moved; returned are the slots that the tree now owns and the node where they end.
        """
        row = self.req_to_token_pool.req_to_token[req_pool_idx, : len(token_ids)]
        if self.disable:
            if del_in_memory_pool:
                self.token_to_kv_pool.free(row)
                self.req_to_token_pool.free([req_pool_idx])
            return self.no_slots, self.root_node
        new_prefix_len = self.insert(token_ids, row)
        self.token_to_kv_pool.free(row[last_uncached_pos:new_prefix_len])
        if del_in_memory_pool:
            self.req_to_token_pool.free([req_pool_idx])
            self.dec_lock_ref(old_last_node)
            return self.no_slots, self.root_node
        slots, last_node = self.match_prefix(token_ids)
        row[last_uncached_pos:] = slots[last_uncached_pos:]
        self.dec_lock_ref(old_last_node)
        self.inc_lock_ref(last_node)
        return slots, last_node

    def evict(self, num_tokens: int, evict_callback: Callable[[Tensor], int]) -> None:
        """Drop unlocked leaves, oldest first, until ``evict_callback(slots)`` has freed ``num_tokens``."""
        leaves = [node for node in self._nodes() if not node.children and node.lock_ref == 0]
        heapq.heapify(leaves)
        num_evicted = 0
        while num_evicted < num_tokens and leaves:
            leaf = heapq.heappop(leaves)
            num_evicted += evict_callback(leaf.value)
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.key[0]]
            self._evictable_size -= len(leaf.key)
            if not parent.children and parent.lock_ref == 0:
                heapq.heappush(leaves, parent)

    def inc_lock_ref(self, node: TreeNode) -> int:
        """Lock the path from ``node`` to the root; return the change of `evictable_size` (at most 0)."""
        delta = 0
        while node.parent is not None:
            if node.lock_ref == 0:
                delta -= len(node.key)
            node.lock_ref += 1
            node = node.parent
        self._move_to_protected(-delta)
        return delta

    def dec_lock_ref(self, node: TreeNode) -> int:
        """Undo one `inc_lock_ref` of the same node; return the change of `evictable_size` (at least 0)."""
        delta = 0
        while node.parent is not None:
            if node.lock_ref == 0:
                raise RuntimeError(f"unlock of a node that is not locked: {len(node.key)} tokens")
            node.lock_ref -= 1
            if node.lock_ref == 0:
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
            print(f"{'  ' * depth}{len(node.key)} tokens, locked {node.lock_ref}x: {list(node.key[:10])}")
            stack.extend((child, depth + 1) for child in node.children.values())

    def _descend(self, node: TreeNode, key: Key) -> tuple[TreeNode, int] | None:
        """The child of ``node`` that agrees with the start of ``key``, split if only in part, and how far."""
        child = node.children.get(key[0]) if key else None
        if child is None:
            return None
        num_agreed = common_prefix_len(child.key, key)
        if num_agreed < len(child.key):
            child = self._split(child, num_agreed)
        self._touch(child)
        return child, num_agreed

    def _split(self, child: TreeNode, split_len: int) -> TreeNode:
        """Cut ``child``'s edge after ``split_len`` tokens; return the new upper node, locked as the child is."""
        parent = child.parent
        assert parent is not None
        upper = TreeNode(parent, child.key[:split_len], child.value[:split_len])
        upper.lock_ref = child.lock_ref
        upper.last_access_time = child.last_access_time
        parent.children[upper.key[0]] = upper
        child.parent, child.key, child.value = upper, child.key[split_len:], child.value[split_len:]
        upper.children[child.key[0]] = child
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
