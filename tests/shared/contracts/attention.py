"""Contract of an attention path: what it computes, against a plain float64 softmax, over a scattered pool.

A case is a list of requests, each with some tokens already in the pool and some new ones; the stage stores the
new tokens' K and V itself. Slots that nobody owns are NaN (INV-NAN).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import Tensor

Mode = Literal["prefill", "extend", "decode"]


@dataclass
class Case:
    """Requests laid end to end. ``slots[i]`` are the pool's slots of request i's whole sequence, in order."""

    mode: Mode
    prefix_lens: list[int]
    new_lens: list[int]
    q: Tensor
    """``[tokens, heads, head_dim]`` of the new tokens; ``k`` and ``v`` ``[tokens, kv_heads, head_dim]``."""
    k: Tensor
    v: Tensor
    slots: list[list[int]]
    k_pool: Tensor
    """``[pool, kv_heads, head_dim]``, the new tokens' slots not yet written."""
    v_pool: Tensor
    contiguous: bool
    """Whether the new tokens' slots are one range."""


def make_case(
    mode: Mode,
    lens: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    contiguous: bool = False,
    pool: int = 900,
    seed: int = 0,
) -> Case:
    """``lens`` are (tokens cached, tokens new) of each request."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    num_new = sum(new for _, new in lens)
    k_pool, v_pool = torch.full((2, pool, kv_heads, dim), float("nan"))
    order = torch.randperm(pool - num_new, generator=generator).tolist()
    fresh = list(range(pool - num_new, pool)) if contiguous else order[-num_new:]
    slots: list[list[int]] = []
    for cached, new in lens:
        taken, order = order[:cached], order[cached:]
        k_pool[taken], v_pool[taken] = draw(cached, kv_heads, dim), draw(cached, kv_heads, dim)
        slots.append([*taken, *fresh[:new]])
        fresh = fresh[new:]
    return Case(
        mode,
        [cached for cached, _ in lens],
        [new for _, new in lens],
        draw(num_new, heads, dim),
        draw(num_new, kv_heads, dim),
        draw(num_new, kv_heads, dim),
        slots,
        k_pool,
        v_pool,
        contiguous,
    )


def expected(case: Case) -> Tensor:
    """The same in float64, one request and one head at a time."""
    outputs, start = [], 0
    group = case.q.shape[1] // case.k.shape[1]
    for cached, new, slots in zip(case.prefix_lens, case.new_lens, case.slots, strict=True):
        rows = slice(start, start + new)
        start += new
        k = torch.cat([case.k_pool[slots[:cached]], case.k[rows]]).double().repeat_interleave(group, dim=1)
        v = torch.cat([case.v_pool[slots[:cached]], case.v[rows]]).double().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", case.q[rows].double(), k) / case.q.shape[2] ** 0.5
        seen = torch.ones(new, cached + new).tril(cached).bool()
        probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", probs, v))
    return torch.cat(outputs)


HEADS = [(4, 4, 16), (4, 2, 16), (6, 2, 16), (9, 3, 64), (8, 1, 32)]


class AttentionContract:
    """Subclass with ``attend``: the output ``[tokens, heads, head_dim]``; it updates the case's pools."""

    tolerance = 1e-5

    @staticmethod
    def attend(case: Case) -> Tensor:
        raise NotImplementedError

    def check(self, case: Case) -> None:
        wanted = expected(case)
        output = self.attend(case).double().cpu()
        assert torch.isfinite(output).all(), "INV-NAN: a slot that is nobody's was read"
        assert (output - wanted).abs().max() < self.tolerance
        new_slots = [slot for slots, n in zip(case.slots, case.new_lens, strict=True) for slot in slots[-n:]]
        assert torch.equal(case.k_pool[new_slots].cpu(), case.k.cpu().to(case.k_pool.dtype))
        assert torch.equal(case.v_pool[new_slots].cpu(), case.v.cpu().to(case.v_pool.dtype))

    @pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
    def test_prefill(self, heads: int, kv_heads: int, dim: int) -> None:
        self.check(make_case("prefill", [(0, 5), (0, 1), (0, 130), (0, 32)], heads, kv_heads, dim))

    @pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
    def test_extend(self, heads: int, kv_heads: int, dim: int) -> None:
        lens = [(7, 5), (0, 9), (129, 1), (1, 1), (64, 64), (3, 140)]
        self.check(make_case("extend", lens, heads, kv_heads, dim))

    @pytest.mark.parametrize("contiguous", [True, False])
    @pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
    def test_decode(self, heads: int, kv_heads: int, dim: int, contiguous: bool) -> None:
        lens = [(7, 1), (1, 1), (128, 1), (300, 1), (31, 1)]
        self.check(make_case("decode", lens, heads, kv_heads, dim, contiguous=contiguous))

    def test_decode_of_one(self) -> None:
        self.check(make_case("decode", [(1, 1)], 4, 2, 16))
        self.check(make_case("decode", [(513, 1)], 4, 2, 16))

    def test_many_small_ones(self) -> None:
        self.check(make_case("decode", [(1 + n % 5, 1) for n in range(70)], 4, 2, 16))
        self.check(make_case("extend", [(n % 4, 1 + n % 3) for n in range(70)], 4, 2, 16))
