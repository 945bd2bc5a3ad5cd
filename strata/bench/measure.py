"""A measured number, and how it is taken: contenders in turn, round after round, so that all meet the same noise."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from .contenders import Contender


@dataclass(frozen=True)
class Row:
    """One line of the report: ``values`` has each contender's rounds, in the order they were measured.

    ``limit`` is what the memory's bandwidth would allow, in the same unit, where that is known.
    """

    workload: str
    case: str
    unit: str
    better: Literal["higher", "lower"]
    values: dict[str, list[float]]
    limit: float | None = None
    note: str = ""

    def median(self, contender: str) -> float:
        return statistics.median(self.values[contender])

    def times_faster(self, contender: str, baseline: str) -> float:
        """How many times better ``contender`` is than ``baseline``."""
        ratio = self.median(contender) / self.median(baseline)
        return ratio if self.better == "higher" else 1 / ratio


def interleave(
    contenders: Sequence[Contender], rounds: int, measure: Callable[[Contender], float]
) -> dict[str, list[float]]:
    """``measure`` each contender ``rounds`` times, one after the other within a round."""
    values: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            values[contender.name].append(measure(contender))
    return values
