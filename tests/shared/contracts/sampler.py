"""Contract of the sampler: right distributions, exact supports, seeds that mean the same in any batch.

Distributions are checked by chi-square over many rows that differ in their seed alone. Seeds are fixed, so a
result never changes between runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

ROWS = 6_000
Params = Mapping[str, Any]


def chi_square_fits(draws: Sequence[int], probs: Tensor) -> bool:
    """Whether ``draws`` look drawn from ``probs``: five standard deviations of the statistic are allowed."""
    counts = Counter(draws)
    support = [i for i, p in enumerate(probs.tolist()) if p > 0]
    assert set(counts) <= set(support), f"drew tokens of probability 0: {set(counts) - set(support)}"
    expected = {i: probs[i].item() * len(draws) for i in support}
    statistic = sum((counts[i] - expected[i]) ** 2 / expected[i] for i in support)
    freedom = max(len(support) - 1, 1)
    return statistic < freedom + 5 * (2 * freedom) ** 0.5


class SamplerContract:
    """Subclass with ``sample``: one token for each row of logits, given its parameters and position."""

    @staticmethod
    def sample(logits: Tensor, params: Sequence[Params], positions: Sequence[int]) -> list[int]:
        raise NotImplementedError

    LOGITS = torch.tensor([2.0, 1.5, 0.2, -0.3, 1.0, -2.0, 0.0, 0.7])

    def many(self, params: Params, rows: int = ROWS) -> list[int]:
        logits = self.LOGITS.repeat(rows, 1)
        return self.sample(logits, [{**params, "seed": seed} for seed in range(rows)], [0] * rows)

    @pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0, 1e9])
    def test_temperature(self, temperature: float) -> None:
        draws = self.many({"temperature": temperature})
        assert chi_square_fits(draws, (self.LOGITS / temperature).softmax(-1))

    def test_a_wrong_distribution_is_noticed(self) -> None:
        """The check itself has power: the draws of temperature 1 don't pass as those of 0.8."""
        assert not chi_square_fits(self.many({"temperature": 1.0}), (self.LOGITS / 0.8).softmax(-1))

    @pytest.mark.parametrize("top_k", [1, 2, 5, 8, 1000])
    def test_top_k(self, top_k: int) -> None:
        kept = self.LOGITS.clone()
        kept[self.LOGITS.argsort(descending=True)[top_k:]] = -torch.inf
        assert chi_square_fits(self.many({"top_k": top_k}), kept.softmax(-1))

    @pytest.mark.parametrize("top_p", [1e-9, 0.05, 0.5, 0.8, 0.95, 1.0])
    def test_top_p(self, top_p: float) -> None:
        """The smallest set of best tokens whose mass reaches top_p; never empty."""
        probs = self.LOGITS.softmax(-1)
        order = probs.argsort(descending=True)
        mass_before = probs[order].cumsum(-1) - probs[order]
        probs[order[mass_before >= top_p]] = 0.0
        assert chi_square_fits(self.many({"top_p": top_p}), probs / probs.sum())

    def test_top_k_and_top_p_and_temperature(self) -> None:
        logits = self.LOGITS / 0.7
        logits[self.LOGITS.argsort(descending=True)[4:]] = -torch.inf
        probs = logits.softmax(-1)
        order = probs.argsort(descending=True)
        probs[order[probs[order].cumsum(-1) - probs[order] >= 0.8]] = 0.0
        draws = self.many({"temperature": 0.7, "top_k": 4, "top_p": 0.8})
        assert chi_square_fits(draws, probs / probs.sum())

    def test_logit_bias(self) -> None:
        bias = {2: 1.8, 0: -3.0}
        logits = self.LOGITS.clone()
        for token, value in bias.items():
            logits[token] += value
        assert chi_square_fits(self.many({"logit_bias": bias}), logits.softmax(-1))
        assert set(self.many({"temperature": 0.0, "logit_bias": {5: 100.0}}, 4)) == {5}
        assert 0 not in self.many({"logit_bias": {0: -100.0}})

    @pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-6, 1e-5, 1e-4])
    def test_tiny_temperatures_are_greedy(self, temperature: float) -> None:
        """Probe B09: dividing by almost nothing must not give inf or NaN."""
        for scale in (1.0, 1e3):
            logits = self.LOGITS.repeat(50, 1) * scale
            params = [{"temperature": temperature, "seed": seed} for seed in range(50)]
            assert self.sample(logits, params, [0] * 50) == [0] * 50

    def test_greedy_takes_the_first_of_equals(self) -> None:
        logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
        assert self.sample(logits, [{"temperature": 0.0}], [0]) == [1]

    def test_every_row_gets_its_own_parameters(self) -> None:
        """Greedy and sampled rows, with and without filters and bias, as if each were alone."""
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(64, 50, generator=generator) * 2
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 0.8, "top_p": 0.9},
            {"temperature": 1.3, "top_k": 7},
            {"logit_bias": {3: 5.0, 4: -5.0}},
            {"temperature": 0.0, "logit_bias": {9: 100.0}},
            {"top_k": 1},
            {"temperature": 2.0, "top_k": 20, "top_p": 0.5},
        ]
        params = [{**kinds[row % len(kinds)], "seed": row * 11} for row in range(64)]
        positions = [row % 5 for row in range(64)]
        together = self.sample(logits.clone(), params, positions)
        alone = [
            self.sample(logits[row : row + 1].clone(), [params[row]], [positions[row]])[0]
            for row in range(64)
        ]
        assert together == alone
        for row in range(0, 64, len(kinds)):
            assert together[row] == int(logits[row].argmax())

    def test_seed_and_position_decide(self) -> None:
        logits = torch.zeros(200, 1000)
        one = self.sample(logits.clone(), [{"seed": 7}] * 200, list(range(200)))
        again = self.sample(logits.clone(), [{"seed": 7}] * 200, list(range(200)))
        other = self.sample(logits.clone(), [{"seed": 8}] * 200, list(range(200)))
        assert one == again
        assert len(set(one)) > 150, "positions of one seed must differ"
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 10

    def test_impossible_tokens_stay_impossible(self) -> None:
        logits = torch.full((500, 9), -torch.inf)
        logits[:, 4] = 0.5
        logits[:, 6] = 0.5
        draws = self.sample(logits, [{"seed": s, "top_p": 0.99} for s in range(500)], [0] * 500)
        assert set(draws) == {4, 6}
