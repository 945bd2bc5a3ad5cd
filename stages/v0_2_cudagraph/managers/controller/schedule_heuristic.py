"""In which order waiting requests are tried for admission.

Owned by the ModelTpServer; keeps no state of its own between steps.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from .radix_cache import RadixCache, TreeNode

if TYPE_CHECKING:
    from .infer_batch import Req


class ScheduleHeuristic:
    """Queue policies of July: longest prefix match, subtree weight, longest output, random, arrival."""

    def __init__(self, schedule_heuristic: str, tree_cache: RadixCache, seed: int = 0) -> None:
        if schedule_heuristic == "lpm" and tree_cache.disable:
            schedule_heuristic = "fcfs"  # nothing ever matches: arrival order is what is left
        self.schedule_heuristic = schedule_heuristic
        self.tree_cache = tree_cache
        self._random = random.Random(seed)

    def get_priority_queue(self, forward_queue: list[Req]) -> list[Req]:
        """``forward_queue`` in the order of the policy; every request's prefix must have been matched."""
        match self.schedule_heuristic:
            case "lpm":
                return sorted(forward_queue, key=lambda req: -len(req.prefix_indices))
            case "random":
                return self._random.sample(forward_queue, len(forward_queue))
            case "lof":
                return sorted(forward_queue, key=lambda req: -req.max_new_tokens)
            case "dfs-weight":
                return self._by_subtree_weight(forward_queue)
            case "fcfs":
                return list(forward_queue)
            case unknown:
                raise ValueError(f"unknown schedule_heuristic: {unknown}")

    def _by_subtree_weight(self, forward_queue: list[Req]) -> list[Req]:
        """Depth first through the tree, children with more waiting requests below them first."""
        waiting_at: defaultdict[TreeNode, list[Req]] = defaultdict(list)
        weight: Counter[TreeNode] = Counter()
        for req in forward_queue:
            waiting_at[req.last_node].append(req)
            node: TreeNode | None = req.last_node
            while node is not None:
                weight[node] += 1
                node = node.parent

        ordered: list[Req] = []
        stack = [self.tree_cache.root_node]
        while stack:
            node = stack.pop()
            ordered += waiting_at[node]
            # The stack gives back the last one first.
            stack += sorted((c for c in node.children.values() if weight[c]), key=lambda c: weight[c])
        return ordered
