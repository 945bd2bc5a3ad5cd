"""The invariants of DESIGN §5 that a `Snapshot` can show, as pure functions. Each raises AssertionError."""

from __future__ import annotations

from collections import Counter

from .engine import Snapshot


def check_pool(state: Snapshot) -> None:
    """INV-POOL: every slot is free, the tree's, or one request's; reference counts equal the holders."""
    owners = Counter([*state.free_slots, *state.tree_slots, *state.request_slots])
    twice = {slot: count for slot, count in owners.items() if count > 1}
    assert not twice, f"INV-POOL: slots with several private owners: {twice}"
    lost = state.size - len(owners)
    assert lost == 0, (
        f"INV-POOL: free {state.free} + tree {len(state.tree_slots)} + requests {len(state.request_slots)} "
        f"is {len(owners)}, the pool has {state.size}"
    )
    tree = set(state.tree_slots)
    for request in state.requests:
        stray = set(request.slots[: request.shared]) - tree
        assert not stray, f"INV-POOL: {request.rid} shares slots that the tree does not hold: {stray}"
    if state.counts is not None:
        holders = Counter(state.tree_slots)
        for request in state.requests:
            holders.update(request.slots)
        wrong = {
            slot: (state.counts.get(slot, 0), holders[slot])
            for slot in state.counts.keys() | holders.keys()
            if state.counts.get(slot, 0) != holders[slot]
        }
        assert not wrong, f"INV-POOL: slot -> (count, holders) differ: {wrong}"


def check_rows(state: Snapshot) -> None:
    """INV-POOL for request rows: one each, none left over."""
    rows = [request.row for request in state.requests]
    assert len(set(rows)) == len(rows), f"INV-POOL: requests share a row: {rows}"
    assert state.rows_used == len(rows), f"INV-POOL: {state.rows_used} rows used by {len(rows)} requests"


def check_locks(state: Snapshot) -> None:
    """INV-LOCK: a node's count is the number of running requests below it; evictable + protected = tree."""
    wanted = Counter(index for request in state.requests for index in state.path(request.node))
    for index, node in enumerate(state.nodes[1:], start=1):
        assert node.locks >= 0, f"INV-LOCK: node {index} has count {node.locks}"
        assert node.locks == wanted[index], f"INV-LOCK: node {index} has {node.locks}, not {wanted[index]}"
    evictable = sum(len(node.slots) for node in state.nodes[1:] if node.locks == 0)
    assert state.evictable == evictable, f"INV-LOCK: evictable {state.evictable}, really {evictable}"
    total = len(state.tree_slots)
    assert state.evictable + state.protected == total, (
        f"INV-LOCK: evictable {state.evictable} + protected {state.protected} is not the tree's {total}"
    )


def check_shared_paths(state: Snapshot) -> None:
    """INV-LOCK: what a request reads of the tree lies on the path it locks, slot by slot."""
    for request in state.requests:
        path = [slot for index in reversed(state.path(request.node)) for slot in state.nodes[index].slots]
        shared = list(request.slots[: request.shared])
        assert path[: len(shared)] == shared, f"INV-LOCK: {request.rid} reads slots outside its locked path"


def check_idle(state: Snapshot) -> None:
    """INV-FREE: with no request left, all is free or evictable, and no row is taken."""
    assert not state.requests and not state.waiting, f"not idle: {state.running} {state.waiting}"
    assert state.free + state.evictable == state.size, (
        f"INV-FREE: free {state.free} + evictable {state.evictable} is not {state.size}"
    )
    assert state.protected == 0 and state.rows_used == 0


def check_all(state: Snapshot) -> None:
    """Everything that must hold after every step."""
    check_pool(state)
    check_rows(state)
    check_locks(state)
    check_shared_paths(state)
