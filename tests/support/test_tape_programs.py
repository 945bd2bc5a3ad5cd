"""Properties of tapes over random programs, and mutants of tapes that the self-check must catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.v0_1_genesis.support import graph_tape
from stages.v0_1_genesis.support.graph_tape import CaptureError, Tape, TapePool
from stages.v0_1_genesis.support.tape import check
from stages.v0_1_genesis.support.tape import program as tape_program
from stages.v0_1_genesis.support.tape.program import Call, Program, map_leaves, same_bits
from stages.v0_1_genesis.support.tape.source import Source

from .random_programs import Fixed, Step, programs, run

Mutation = Callable[[Program, int], Program]


def replays_like_a_plain_run(
    graph: Tape, outputs: tuple[Tensor, ...], program: list[Step], fixed: Fixed
) -> bool:
    """Whether outputs and fixed tensors agree bit by bit, on new inputs."""
    fixed.vary()
    start = fixed.snapshot()
    with torch.inference_mode():
        expected = [output.clone() for output in run(program, fixed)]
    written = fixed.snapshot()
    fixed.restore(start)
    graph.replay()
    return all(map(same_bits, outputs, expected)) and all(map(same_bits, fixed.tensors, written))


@pytest.mark.slow
@settings(max_examples=100)
@given(program=programs)
def test_a_replay_is_a_plain_run(program: list[Step]) -> None:
    torch.manual_seed(0)
    fixed = Fixed()
    graph = Tape(TapePool())
    outputs = graph.capture(lambda: run(program, fixed), fixed.vary)
    assert all(replays_like_a_plain_run(graph, outputs, program, fixed) for _ in range(2)), graph.source


# -- mutants ---------------------------------------------------------------------------------------------


def stale_buffer(program: Program, number: int) -> Program:
    """One fixed tensor is a copy from the time of the capture."""
    fixed = list(program.fixed)
    fixed[number % len(fixed)] = fixed[number % len(fixed)].clone()
    return replace(program, fixed=fixed)


def missing_call(program: Program, number: int) -> Program:
    """A call in place did not get recorded."""
    writing = [i for i, call in enumerate(program.calls) if call.writes]
    dropped = writing[number % len(writing)] if writing else -1
    return replace(program, calls=[call for i, call in enumerate(program.calls) if i != dropped])


def reordered_calls(program: Program, number: int) -> Program:
    """Two neighbours that do not need each other's results change places."""
    calls = list(program.calls)
    swappable = [i for i in range(len(calls) - 1) if not _uses(calls[i + 1], calls[i])]
    if swappable:
        i = swappable[number % len(swappable)]
        calls[i], calls[i + 1] = calls[i + 1], calls[i]
    return replace(program, calls=calls)


def frozen_number(program: Program, number: int) -> Program:
    """A number among the arguments is another."""
    calls = list(program.calls)
    i = number % len(calls) if calls else 0
    if calls:
        calls[i] = replace(calls[i], args=map_leaves(_next_number, calls[i].args))
    return replace(program, calls=calls)


def shifted_view(program: Program, number: int) -> Program:
    """A view of a temporary begins at the wrong place."""
    calls = list(program.calls)
    i = number % len(calls) if calls else 0
    if calls:
        calls[i] = replace(calls[i], args=map_leaves(_shift, calls[i].args))
    return replace(program, calls=calls)


def _uses(later: Call, earlier: Call) -> bool:
    made = {temp.buffer for temp in earlier.results.values()}
    read = [
        leaf
        for leaf in tape_program.leaves((later.args, later.kwargs))
        if isinstance(leaf, tape_program.Temp)
    ]
    return any(temp.buffer in made for temp in read)


def _next_number(leaf: object) -> object:
    return leaf + 1.0 if isinstance(leaf, float) else leaf


def _shift(leaf: object) -> object:
    if isinstance(leaf, tape_program.Temp) and leaf.offset > 0:
        return replace(leaf, offset=leaf.offset - 1)
    return leaf


MUTATIONS = [stale_buffer, missing_call, reordered_calls, frozen_number, shifted_view]


def mutated(mutation: Mutation, number: int) -> Callable[..., Source]:
    mutant = cache(lambda program_id: mutation(programs_by_id[program_id], number))
    programs_by_id: dict[int, Program] = {}

    def source(program: Program, *rest: Any) -> Source:
        programs_by_id[id(program)] = program
        return Source(mutant(id(program)), *rest)

    return source


@pytest.mark.slow
@settings(max_examples=100)
@given(program=programs, mutation=st.sampled_from(MUTATIONS), number=st.integers(0, 10))
def test_a_mutant_that_passes_the_self_check_does_no_harm(
    program: list[Step], mutation: Mutation, number: int
) -> None:
    torch.manual_seed(0)
    fixed = Fixed()
    graph = Tape(TapePool())
    with patch.object(graph_tape, "Source", mutated(mutation, number)):
        try:
            outputs = graph.capture(lambda: run(program, fixed), fixed.vary)
        except (CaptureError, KeyError, RuntimeError, TypeError):
            return
    assert all(replays_like_a_plain_run(graph, outputs, program, fixed) for _ in range(2)), graph.source


NAMED: dict[Mutation, tuple[int, str]] = {
    stale_buffer: (0, r"output 0 .* first in aten\.mul"),
    missing_call: (0, r"first in aten\.add_"),
    reordered_calls: (0, r"first in aten\.add_"),
    frozen_number: (0, r"first in aten\.mul"),
    shifted_view: (1, r"first in aten\.add_"),
}


@pytest.mark.parametrize("mutation", NAMED)
def test_named_mutants_are_caught_and_the_call_is_named(mutation: Mutation) -> None:
    torch.manual_seed(0)
    fixed = Fixed()

    def model() -> Tensor:
        h = fixed.x * 2.0
        h[:, :3].add_(h[:, 3:])
        h[:, :3].mul_(3.0)
        fixed.table.index_copy_(0, fixed.index, h)
        return fixed.table.index_select(0, fixed.index) + h

    number, message = NAMED[mutation]
    source = mutated(mutation, number)
    with (
        patch.object(graph_tape, "Source", source),
        patch.object(check, "Source", source),
        pytest.raises(CaptureError, match=message) as caught,
    ):
        Tape(TapePool()).capture(model, fixed.vary)
    assert __file__ in str(caught.value)


def test_a_store_that_no_output_shows_is_missed_too() -> None:
    torch.manual_seed(0)
    fixed = Fixed()

    def model() -> Tensor:
        fixed.table.index_copy_(0, fixed.index, fixed.x)
        return fixed.x + 1

    with (
        patch.object(graph_tape, "Source", mutated(missing_call, 0)),
        pytest.raises(CaptureError, match=r"what aten\.index_copy_\.default .* writes"),
    ):
        Tape(TapePool()).capture(model, fixed.vary)
