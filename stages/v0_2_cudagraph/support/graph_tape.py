"""Graphs: one run of a function, recorded once and replayed without the Python that led to it.

The model runner owns one graph per captured batch size, all in one pool; they live as long as the model.
Two kinds with one face: on a GPU a CUDA graph, on the CPU the tape, which freezes host control flow, shapes
and addresses as a CUDA graph does. Usage::

    ids = torch.zeros(8, dtype=torch.int64, device=device)       # static inputs: made before, refilled in place
    run = partial(model, ids, positions, metadata)               # metadata holds more of them
    pool = make_pool(device)
    graph = make_graph(device, pool)
    run(), run()                                                 # warm up: some things are made on first use
    logits = graph.capture(run, vary=lambda: ids.random_(vocab_size))

    ids[:num].copy_(new_ids)                                     # every step: fill the static inputs, pad them,
    ids[num:] = 0                                                # plan what is planned on the host,
    graph.replay()
    logits[:num]                                                 # read before another graph of the pool runs

The function reads nothing but static inputs, weights and pools, always at the same addresses. Run twice on the
same inputs it leaves the same state (storing K and V by slot does); it draws no random numbers. A tensor that
only opaque ops read, such as a decode plan, may change its shape between replays of a tape: by ``resize_``, as
the same object. Nothing is read on the host, for that value would stay what it was: such reads are refused
where they are seen, and the others are found by a self-check after recording, for which ``vary`` puts other
valid contents in the static inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from .tape.check import check
from .tape.program import Temp, leaves, map_leaves
from .tape.recorder import Recorder
from .tape.refusals import CaptureError
from .tape.source import Source

__all__ = ["CaptureError", "Graph", "make_graph", "make_pool"]

T = TypeVar("T")

CUDA_TOLERANCE = 0.02
"""How far an output of a CUDA graph may be from a plain run, as a share of its largest value: torch may choose
other kernels while it captures. A frozen value is off by far more."""

ALIGNMENT = 64
"""Bytes; outputs in a pool begin at multiples."""


class Graph(Protocol):
    def capture(self, fn: Callable[[], T], vary: Callable[[], object]) -> T:
        """Record ``fn`` and check a replay; return its outputs, which every replay fills anew.

        Outputs are a tensor, or tuples, lists, dicts and dataclasses with tensors in them. The static inputs
        are left as ``vary`` fills them. ``fn`` runs in inference mode, several times.

        Raises:
            CaptureError: ``fn`` can't be frozen. The message names the call and its line.
        """

    def replay(self) -> None:
        """Run what was recorded, on what the static inputs hold now."""


def make_pool(device: torch.device) -> Any:
    """Memory that graphs share which never run at once: a replay may overwrite the outputs of the others."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else TapePool()


def make_graph(device: torch.device, pool: Any) -> Graph:
    """An empty graph for ``device``, with memory of ``pool``, which `make_pool` made."""
    return CudaGraph(pool) if device.type == "cuda" else Tape(pool)


class CudaGraph:
    """A CUDA graph on the current device."""

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    @torch.inference_mode()
    def capture(self, fn: Callable[[], T], vary: Callable[[], object]) -> T:
        with torch.cuda.graph(self._graph, pool=self._pool):
            outputs = fn()
        vary()
        expected = [leaf.clone() for leaf in leaves(fn()) if isinstance(leaf, Tensor)]
        self.replay()
        actual = [leaf for leaf in leaves(outputs) if isinstance(leaf, Tensor)]
        for i, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            limit = CUDA_TOLERANCE * float(theirs.float().nan_to_num().abs().max())
            if not torch.allclose(ours.float(), theirs.float(), rtol=0.0, atol=limit, equal_nan=True):
                raise CaptureError(f"on other inputs, output {i} of a replay and of a plain run differ")
        return outputs

    def replay(self) -> None:
        self._graph.replay()


class Tape:
    """The CPU's stand-in for a CUDA graph: the recorded calls as one Python function, see `tape`."""

    def __init__(self, pool: TapePool) -> None:
        self._pool = pool
        self.source = ""
        """The function, for readers."""

    @torch.inference_mode()
    def capture(self, fn: Callable[[], T], vary: Callable[[], object]) -> T:
        recorded, program = Recorder().record(fn)
        outputs, copies = self._pool.place(recorded, program.outputs)
        source = Source(program, copies)
        self.source = source.text
        self._function = source.compile()
        check(program, copies, self._function, outputs, fn, vary)
        return outputs

    @torch.inference_mode()
    def replay(self) -> None:
        self._function()


class TapePool:
    """One buffer at whose start the outputs of every tape lie; as large as the largest needs."""

    def __init__(self) -> None:
        self._storage = torch.empty(0, dtype=torch.uint8).untyped_storage()

    @torch.inference_mode(False)
    def place(self, recorded: T, references: Any) -> tuple[T, list[tuple[Temp, Tensor]]]:
        """Static tensors for what a recording returned, with its contents, and which temporary each is for.

        Outputs that are fixed tensors stay what they are.
        """
        pairs = zip(leaves(recorded), leaves(references), strict=True)
        temps = {reference: value for value, reference in pairs if isinstance(reference, Temp)}
        sizes = (-(-value.nbytes // ALIGNMENT) * ALIGNMENT for value in temps.values())
        *starts, end = accumulate(sizes, initial=0)
        if end > self._storage.nbytes():
            self._storage.resize_(end)
        statics = {
            reference: self._at(start, value)
            for start, (reference, value) in zip(starts, temps.items(), strict=True)
        }
        in_order = iter(leaves(references))

        def static(value: Any) -> Any:
            reference = next(in_order)
            return statics[reference] if isinstance(reference, Temp) else value

        return map_leaves(static, recorded), list(statics.items())

    def _at(self, start: int, like: Tensor) -> Tensor:
        """A copy of ``like`` that begins at byte ``start`` of the pool."""
        strides = torch.empty_like(like, device="meta").stride()
        static = torch.empty(0, dtype=like.dtype)
        return static.set_(self._storage, start // like.itemsize, like.shape, strides).copy_(like)
