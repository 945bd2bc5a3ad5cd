"""Random little programs of torch ops over fixed tensors, for tests that compare tapes with plain runs.

A program is data (a list of steps), so that hypothesis can shrink it. What a step can't do with the tensors
it gets it leaves out, which depends on shapes alone and so is the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from stages.v0_1_genesis.support.graph_tape import CaptureError

ROWS, COLUMNS, TABLE_ROWS = 4, 6, 8


class Fixed:
    """The tensors a program works on; ``index`` is a static input too, of rows of ``table``."""

    def __init__(self) -> None:
        self.x = torch.empty(ROWS, COLUMNS)
        self.y = torch.empty(ROWS, COLUMNS)
        self.index = torch.empty(ROWS, dtype=torch.int64)
        self.table = torch.empty(TABLE_ROWS, COLUMNS)
        self.vary()

    def vary(self) -> None:
        for tensor in (self.x, self.y, self.table):
            tensor.normal_()
        self.index.copy_(torch.randperm(TABLE_ROWS)[:ROWS])

    @property
    def tensors(self) -> list[Tensor]:
        return [self.x, self.y, self.table, self.index]

    def snapshot(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self.tensors]

    def restore(self, snapshot: list[Tensor]) -> None:
        for tensor, saved in zip(self.tensors, snapshot, strict=True):
            tensor.copy_(saved)


Op = Callable[[Fixed, Tensor, Tensor, int], "Tensor | tuple[Tensor, ...]"]

OPS: dict[str, Op] = {
    # arithmetic and reductions
    "add": lambda f, a, b, n: a + b,
    "sub": lambda f, a, b, n: torch.sub(a, b, alpha=n),
    "mul": lambda f, a, b, n: a * b,
    "scale": lambda f, a, b, n: a * (n - 2.5),
    "matmul": lambda f, a, b, n: torch.tanh(a @ b),
    "sum": lambda f, a, b, n: a.sum(n % max(a.dim(), 1), keepdim=bool(n & 1)),
    "max": lambda f, a, b, n: a.max(n % a.dim())[0],
    "softmax": lambda f, a, b, n: a.softmax(-1),
    "where": lambda f, a, b, n: torch.where(a > 0, a, b),
    "cat": lambda f, a, b, n: torch.cat([a, b, a], dim=n % a.dim()),
    "clone": lambda f, a, b, n: a.clone(),
    "constant": lambda f, a, b, n: torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, float(n)]),
    # views, and what is one only sometimes
    "t": lambda f, a, b, n: a.transpose(0, -1),
    "slice": lambda f, a, b, n: a[n % 3 :: 1 + n % 2],
    "narrow": lambda f, a, b, n: a[..., n % 3 : 4],
    "select": lambda f, a, b, n: a.select(n % a.dim(), 0),
    "chunk": lambda f, a, b, n: a.chunk(2, dim=n % a.dim()),
    "unflatten": lambda f, a, b, n: a.unflatten(-1, (2, -1)),
    "flatten": lambda f, a, b, n: a.flatten(max(a.dim() - 2, 0)),
    "unsqueeze": lambda f, a, b, n: a.unsqueeze(n % (a.dim() + 1)),
    "expand": lambda f, a, b, n: a.expand(2, *a.shape),
    "contiguous": lambda f, a, b, n: a.contiguous(),
    "bits": lambda f, a, b, n: a.view(torch.int32).view(torch.float32),
    "float": lambda f, a, b, n: a.float(),
    # in place
    "add_": lambda f, a, b, n: a.add_(b),
    "mul_": lambda f, a, b, n: a.mul_(n / 2),
    "copy_": lambda f, a, b, n: a.copy_(b) if a is not b else a,
    "fill": lambda f, a, b, n: a[:1].fill_(n),
    "set": lambda f, a, b, n: _set(a, b),
    "t_": lambda f, a, b, n: a.clone().t_().squeeze_(),
    "out": lambda f, a, b, n: torch.mul(b.expand_as(a), 2.0, out=a),
    # by the static index
    "look up": lambda f, a, b, n: f.table.index_select(0, f.index),
    "index": lambda f, a, b, n: f.table[f.index, : 2 + n % 4],
    "store": lambda f, a, b, n: f.table.index_copy_(0, f.index, a),
    "put": lambda f, a, b, n: f.table.index_put_((f.index,), a, accumulate=bool(n & 1)),
    "gather": lambda f, a, b, n: f.table.gather(0, f.index.unsqueeze(1)),
    "index_add": lambda f, a, b, n: f.table.index_add_(0, f.index, a),
}


def _set(a: Tensor, b: Tensor) -> Tensor:
    a[1:2] = b[:1]
    return a


@dataclass(frozen=True)
class Step:
    """``op`` on two of the tensors there are, counted from the newest."""

    op: str
    a: int
    b: int
    n: int


steps = st.builds(Step, st.sampled_from(sorted(OPS)), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))
programs = st.lists(steps, min_size=1, max_size=14)


def run(program: list[Step], fixed: Fixed) -> tuple[Tensor, ...]:
    """Run ``program``; its outputs are the fixed tensors and the last few others."""
    values = [fixed.x, fixed.y, fixed.table]
    for step in program:
        a, b = values[-1 - step.a % len(values)], values[-1 - step.b % len(values)]
        try:
            made = OPS[step.op](fixed, a, b, step.n)
        except CaptureError:
            raise
        except (RuntimeError, IndexError, ZeroDivisionError):
            continue
        values += [x for x in (made if isinstance(made, tuple) else (made,)) if x.numel() <= 1000]
    return (fixed.x, fixed.index, *values[3:][-5:])
