"""Contract of the prefix tree: it answers as a dictionary of sequences would, and accounts for every slot.

The model is simple on purpose: a set of cached prefixes with the slot of each, and a multiset of locks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

Key = tuple[int, ...]


class Tree(Protocol):
    """What the contract needs of a stage's tree; slots are plain ints here."""

    def match(self, key: Sequence[int]) -> tuple[list[int], Any]: ...
    def insert(self, key: Sequence[int], slots: Sequence[int]) -> int: ...
    def evict(self, num_tokens: int) -> list[int]:
        """The slots that were given back."""
        ...

    def lock(self, node: Any) -> int: ...
    def unlock(self, node: Any) -> int: ...
    def evictable(self) -> int: ...
    def protected(self) -> int: ...
    def total(self) -> int: ...
    def nodes(self) -> list[tuple[Key, list[int], int]]:
        """For every node but the root: its whole key from the root, its own slots, its lock count."""
        ...


class TreeMachine(RuleBasedStateMachine):
    """Random inserts, matches, locks, unlocks and evictions against a dictionary."""

    make_tree: Any
    locked = Bundle("locked")
    keys = st.lists(st.integers(0, 2), max_size=9).map(tuple)

    def __init__(self) -> None:
        super().__init__()
        self.tree: Tree = type(self).make_tree()
        self.slot_of: dict[Key, int] = {}
        """Every cached prefix (all lengths) and the slot of its last token."""
        self.locks: list[Key] = []
        self.next_slot = 0

    def _cached_len(self, key: Key) -> int:
        return next((n for n in range(len(key), 0, -1) if key[:n] in self.slot_of), 0)

    def _locked_prefixes(self) -> set[Key]:
        return {key[:n] for key in self.locks for n in range(1, len(key) + 1)}

    @rule(key=keys)
    def insert(self, key: Key) -> None:
        slots = list(range(self.next_slot, self.next_slot + len(key)))
        self.next_slot += len(key)
        had = self.tree.insert(key, slots)
        assert had == self._cached_len(key)
        for n in range(had, len(key)):
            self.slot_of[key[: n + 1]] = slots[n]

    @rule(key=keys)
    def match(self, key: Key) -> None:
        slots, _ = self.tree.match(key)
        assert slots == [self.slot_of[key[: n + 1]] for n in range(self._cached_len(key))]

    @rule(target=locked, key=keys)
    def match_and_lock(self, key: Key) -> tuple[Any, Key]:
        slots, node = self.tree.match(key)
        before = self.tree.evictable()
        delta = self.tree.lock(node)
        assert delta <= 0 and self.tree.evictable() == before + delta
        self.locks.append(key[: len(slots)])
        return node, key[: len(slots)]

    @rule(handle=consumes(locked))
    def unlock(self, handle: tuple[Any, Key]) -> None:
        node, key = handle
        before = self.tree.evictable()
        delta = self.tree.unlock(node)
        assert delta >= 0 and self.tree.evictable() == before + delta
        self.locks.remove(key)

    @rule(target=locked, handle=consumes(locked))
    def relock(self, handle: tuple[Any, Key]) -> Any:
        """A handle may be locked by several requests."""
        node, key = handle
        self.tree.lock(node)
        self.locks.append(key)
        return multiple((node, key), (node, key))

    @rule(num_tokens=st.integers(0, 12))
    def evict(self, num_tokens: int) -> None:
        before = self.tree.evictable()
        freed = self.tree.evict(num_tokens)
        assert len(set(freed)) == len(freed)
        assert len(freed) >= min(num_tokens, before), "evicted less than it could"
        gone = {key for key, slot in self.slot_of.items() if slot in set(freed)}
        assert len(gone) == len(freed), "evicted a slot that it did not hold"
        assert not gone & self._locked_prefixes(), "INV-LOCK: evicted under a lock"
        self.slot_of = {key: slot for key, slot in self.slot_of.items() if key not in gone}
        for key in self.slot_of:
            assert not any(key[:n] in gone for n in range(1, len(key))), "evicted above what stays"

    @invariant()
    def accounts(self) -> None:
        locked = self._locked_prefixes()
        assert self.tree.total() == len(self.slot_of)
        assert self.tree.protected() == len(locked)
        assert self.tree.evictable() == len(self.slot_of) - len(locked)

    @invariant()
    def structure(self) -> None:
        seen: dict[Key, int] = {}
        edges: set[tuple[Key, int]] = set()
        for key, slots, locks in self.tree.nodes():
            assert slots, "an empty node"
            start = len(key) - len(slots)
            assert (key[:start], key[start]) not in edges, "two children start with the same token"
            edges.add((key[:start], key[start]))
            for n, slot in enumerate(slots, start + 1):
                seen[key[:n]] = slot
            assert locks == sum(lock[: len(key)] == key for lock in self.locks), "INV-LOCK: wrong count"
        assert seen == self.slot_of


class TreeContract:
    """Subclass with ``make_tree``."""

    @staticmethod
    def make_tree(disable: bool = False) -> Tree:
        raise NotImplementedError

    def test_like_a_dictionary(self) -> None:
        machine = type("Machine", (TreeMachine,), {"make_tree": staticmethod(self.make_tree)})
        run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=40))

    def test_lock_covers_the_matched_node(self) -> None:
        """Probe B17: a split, a lock on the upper half, and everything evicted that may be."""
        tree = self.make_tree()
        tree.insert(range(1, 9), range(1, 9))
        slots, node = tree.match([1, 2, 3, 4])
        assert slots == [1, 2, 3, 4]
        assert tree.lock(node) == -4
        assert (tree.evictable(), tree.protected()) == (4, 4)
        assert sorted(tree.evict(8)) == [5, 6, 7, 8]
        assert tree.match(range(1, 9))[0] == [1, 2, 3, 4]
        assert tree.unlock(node) == 4
        with pytest.raises(RuntimeError):
            tree.unlock(node)
        assert (tree.evictable(), tree.protected(), tree.total()) == (4, 0, 4)
        assert all(locks == 0 for _, _, locks in tree.nodes())

    def test_splits_where_a_key_diverges_inside_an_edge(self) -> None:
        """History's bug of January (#7): the whole edge came back as the matched node, and was locked."""
        tree = self.make_tree()
        tree.insert([1, 2, 3, 4, 5], [10, 11, 12, 13, 14])
        slots, node = tree.match([1, 2, 9])
        assert slots == [10, 11]
        tree.lock(node)
        assert tree.protected() == 2
        assert tree.insert([1, 2, 9, 9], [20, 21, 22, 23]) == 2
        assert tree.match([1, 2, 9, 9])[0] == [10, 11, 22, 23]
        assert tree.match([1, 2, 3, 4, 5])[0] == [10, 11, 12, 13, 14]

    def test_evicts_the_least_recently_used_first(self) -> None:
        tree = self.make_tree()
        for first in (1, 2, 3):
            tree.insert([first, 7, 7], [first * 10, first * 10 + 1, first * 10 + 2])
        tree.match([1, 7, 7])
        assert sorted(tree.evict(3)) == [20, 21, 22]
        assert sorted(tree.evict(1)) == [30, 31, 32]
        assert tree.match([1, 7, 7])[0] == [10, 11, 12]

    def test_a_lock_survives_a_split_below_and_above_it(self) -> None:
        tree = self.make_tree()
        tree.insert([1, 2, 3, 4], [1, 2, 3, 4])
        _, node = tree.match([1, 2, 3, 4])
        tree.lock(node)
        tree.insert([1, 2, 8], [0, 0, 8])  # splits the locked edge
        assert (tree.protected(), tree.evictable()) == (4, 1)
        assert tree.evict(9) == [8]
        tree.unlock(node)
        assert (tree.protected(), tree.evictable()) == (0, 4)

    def test_deep_trees_need_no_recursion(self) -> None:
        tree, depth = self.make_tree(), 400
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(len(inspect.stack(0)) + depth // 2)
        try:
            for n in range(1, depth + 1):
                tree.insert([5] * n, range(n))  # every insert adds one node below the last
            _, node = tree.match([5] * depth)
            assert tree.lock(node) == -depth and tree.unlock(node) == depth
            assert tree.total() == depth and len(tree.nodes()) == depth
            assert len(tree.evict(depth)) == depth
        finally:
            sys.setrecursionlimit(limit)

    def test_disabled_keeps_nothing(self) -> None:
        """History's bug (#451): a disabled tree claimed to own what it was given."""
        tree = self.make_tree(disable=True)
        assert tree.insert([1, 2, 3], [4, 5, 6]) == 3
        assert tree.match([1, 2, 3])[0] == []
        assert tree.evict(3) == []
        assert (tree.total(), tree.evictable(), tree.protected()) == (0, 0, 0)
