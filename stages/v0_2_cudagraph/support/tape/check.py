"""The self-check of a tape: on other inputs, its replay must do what a plain run of the function does.

Three things are compared: the calls of a second recording with those of the first (a value that went through
the host shows as another argument, shape, constant, tensor or path), the outputs, and what was written to
fixed tensors. Bit by bit: both sides make the same calls. Lives while a tape is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from .program import Call, Constant, Fixed, Program, Temp, leaves, same_bits
from .recorder import Recorder, Watcher
from .refusals import CaptureError
from .source import Source

FEW_ROWS_OF_A_DIMENSION = {"index_copy_", "index_add_", "index_fill_", "index_reduce_"}
FEW_PLACES = {"index_put_", "_index_put_impl_"}
"""Ops that write little of what may be a whole pool of tokens."""

SMALL = 1 << 20
"""Bytes up to which a fixed tensor is watched for writes outside of the program: static inputs, not weights."""


def check(
    program: Program,
    copies: list[tuple[Temp, Tensor]],
    replay: Callable[[], None],
    outputs: Any,
    fn: Callable[[], Any],
    vary: Callable[[], object],
) -> None:
    """Compare ``replay`` with ``fn`` after ``vary`` has changed the static inputs.

    What both write to fixed tensors is undone. ``replay`` was made of ``program`` and ``copies``, and fills
    ``outputs``, which still hold what the recording computed.

    Raises:
        CaptureError: they differ; the message names the first call or output that does.
    """
    recorded = [tensor.clone() for tensor in _tensors(outputs)]
    vary()
    copies_of_small = [(x, x.clone()) for x in program.fixed if not x.is_mkldnn and x.nbytes <= SMALL]
    journal = Journal()
    returned, second = Recorder(program, journal).record(fn)
    expected = [tensor.clone() for tensor in _tensors(returned)]
    journal.undo()
    _compare_programs(program, second)
    for tensor, copy in copies_of_small:
        if not same_bits(tensor, copy):
            raise CaptureError(
                f"something that torch does not see writes a tensor of shape {[*tensor.shape]}"
            )
    if recorded and all(map(same_bits, recorded, expected)):
        raise CaptureError("vary() changed no output, so the self-check would prove nothing")
    replay()
    difference = _difference(outputs, expected, journal)
    journal.undo()
    if difference is not None:
        culprit = _first_differing_call(program, copies, fn)
        raise CaptureError(f"on other inputs, a replay and a plain run differ: {difference}{culprit}")


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(outputs) if isinstance(leaf, Tensor)]


# -- calls -----------------------------------------------------------------------------------------------


def _compare_programs(first: Program, second: Program) -> None:
    """Raise CaptureError at the first call that is not the same in both."""
    for ours, theirs in zip_longest(first.calls, second.calls):
        if ours != theirs:
            raise CaptureError(_explain(ours, theirs, known=len(first.fixed)))
    for old, new in zip_longest(leaves(first.outputs), leaves(second.outputs)):
        if old != new:
            raise CaptureError(f"with other inputs, the function returns {new}; a replay would return {old}")


def _explain(ours: Call | None, theirs: Call | None, known: int) -> str:
    call = ours or theirs
    start = f"{call}: with other inputs, the function "
    if ours is None or theirs is None or ours.op is not theirs.op:
        return start + f"calls {theirs or 'nothing more'} here, not {ours or 'nothing more'}"
    pairs = zip_longest(leaves((ours.args, ours.kwargs)), leaves((theirs.args, theirs.kwargs)))
    old, new = next((pair for pair in pairs if pair[0] != pair[1]), (ours.results, theirs.results))
    if isinstance(new, Constant):
        return start + "makes another tensor of host data; a replay would keep the first"
    if isinstance(new, Fixed) and new.index >= known:
        return start + "reads a tensor that was not there in the first run; a replay would read the old one"
    return start + f"passes {new}; a replay would pass {old}"


# -- effects ---------------------------------------------------------------------------------------------


@dataclass
class Region:
    """What a call may write of a fixed tensor: how to read and write it, and what it was before and after."""

    call: Call
    read: Callable[[], Tensor]
    write: Callable[[Tensor], Any]
    before: Tensor = field(init=False)
    after: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.before = self.read()


def _region(call: Call, args: tuple[Any, ...], tensor: Tensor) -> Region:
    if call.name in FEW_ROWS_OF_A_DIMENSION and tensor is args[0]:
        dim, rows = args[1], args[2].clone()
        return Region(
            call, lambda: tensor.index_select(dim, rows), lambda values: tensor.index_copy_(dim, rows, values)
        )
    if call.name in FEW_PLACES and tensor is args[0]:
        places = [None if index is None else index.clone() for index in args[1]]
        index, index_put_ = torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default
        return Region(call, lambda: index(tensor, places), lambda values: index_put_(tensor, places, values))
    return Region(call, tensor.clone, tensor.copy_)


class Journal(Watcher):
    """What a run writes to fixed tensors, to be compared and undone; and its results, if wanted."""

    def __init__(self, keep_results: bool = False) -> None:
        self._keep_results = keep_results
        self._is_complete = False
        self._next_regions: list[Region] = []
        self.regions: list[Region] = []
        self.results: dict[int, list[Tensor]] = {}

    def before_call(self, call: Call, args: tuple[Any, ...], fixed: list[Tensor]) -> None:
        self._next_regions = [_region(call, args, tensor) for tensor in fixed]

    def after_call(self, index: int, changed: list[Tensor]) -> None:
        self.regions += self._next_regions
        if self._keep_results:
            self.results[index] = [tensor.clone() for tensor in changed]

    def undo(self) -> None:
        """Put back what was there before the run. The first time, keep what the run wrote."""
        if not self._is_complete:
            for region in self.regions:
                region.after = region.read()
            self._is_complete = True
        for region in reversed(self.regions):
            region.write(region.before)


def _difference(outputs: Any, expected: list[Tensor], journal: Journal) -> str | None:
    """The first output or write that is not as expected."""
    for i, (ours, theirs) in enumerate(zip(_tensors(outputs), expected, strict=True)):
        if not same_bits(ours, theirs):
            return f"output {i} by up to {_distance(ours, theirs):.3g}"
    for region in journal.regions:
        if not same_bits(region.read(), region.after):
            return f"what {region.call} writes by up to {_distance(region.read(), region.after):.3g}"
    return None


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.shape == b.shape else float("inf")


def _first_differing_call(program: Program, copies: list[tuple[Temp, Tensor]], fn: Callable[[], Any]) -> str:
    """Run both once more and look at every temporary: the first call whose results differ, as text."""
    journal = Journal(keep_results=True)
    Recorder(program, journal).record(fn)
    journal.undo()
    found: list[int] = []

    def probe(index: int, changed: list[Tensor]) -> None:
        if not found and not all(map(same_bits, changed, journal.results.get(index, []))):
            found.append(index)

    Source(program, copies, probe).compile()()
    journal.undo()
    return f", first in {program.calls[found[0]]}" if found else ""
