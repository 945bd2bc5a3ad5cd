"""In which order waiting requests are tried for admission, and what a running one is expected to need.

Owned by the ModelRpcServer; keeps no state of its own between steps.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from .radix_cache import RadixCache, TreeNode

if TYPE_CHECKING:
    from .infer_batch import Req


class Scheduler:
    """Queue policies of January: longest prefix match, subtree weight, random, first come first served."""

    def __init__(self, schedule_heuristic: str, tree_cache: RadixCache, seed: int = 0) -> None:
        if schedule_heuristic == "lpm" and tree_cache.disable:
            schedule_heuristic = "fcfs"  # nothing ever matches: arrival order is what is left
        self.schedule_heuristic = schedule_heuristic
        self.tree_cache = tree_cache
        self._random = random.Random(seed)

    def new_token_estimation_ratio(self) -> float:
        """Share of their remaining tokens that running requests are expected to generate.

        Most requests stop before their limit; arrival order reorders nothing, so it estimates higher.
        """
        return 0.5 if self.schedule_heuristic == "fcfs" else 0.4

    def get_priority_queue(self, forward_queue: list[Req]) -> list[Req]:
        """``forward_queue`` in the order of the policy; every request's prefix must have been matched."""
        match self.schedule_heuristic:
            case "lpm":
                return sorted(forward_queue, key=lambda req: -len(req.prefix_indices))
            case "random":
                return self._random.sample(forward_queue, len(forward_queue))
            case "weight":
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
