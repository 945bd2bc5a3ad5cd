"""One copy back to the host per decode step: the new ids (DESIGN §12).

On the CPU nothing is copied, but every read of a tensor by the host is a call on a tensor, and those are
counted, by the stage's file that makes them. On a GPU each would wait for the device.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from strata.adapters import DIALECTS

from .driving import greedy, prompt, run
from .fixtures import EngineFactory

READS = {
    *("tolist", "item", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__"),
    *("__len__", "__contains__", "unique", "masked_select", "allclose", "equal"),
}
# Reading a size is free; the staging buffer touches host memory; the greedy choice reads logits by numpy on the
# CPU alone, where they are host memory too; so is the token table, in which the CPU's plan looks for a run of slots.
FREE = {("__len__", None), ("numpy", "staging.py"), ("numpy", "sampling_ops.py")}
FREE |= {("__int__", "paged_decode.py"), ("equal", "paged_decode.py")}
# v0.1 searches free slots on the device, and must read how many it found, in every step: what later stages get rid
# of. v0.2 searches once for at least 512 slots.
SEARCHES = {"v0.1": None, "v0.2": 1}


class CountReads(TorchFunctionMode):
    """Counts (file of the stage, read) while it is active."""

    def __init__(self, package: str) -> None:
        super().__init__()
        self.folder = f"/{package.replace('.', '/')}/"
        self.reads: Counter[tuple[str, str]] = Counter()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS and (name, None) not in FREE:
            frame = sys._getframe(1)
            while frame is not None and self.folder not in frame.f_code.co_filename:
                frame = frame.f_back  # type: ignore[assignment]
            if frame is not None:
                file = Path(frame.f_code.co_filename).name
                if (name, file) not in FREE:
                    self.reads[file, name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sampling", ["greedy", "sampled", "mixed"])
def test_one_copy_back_per_decode_step(engines: EngineFactory, stage: str, sampling: str) -> None:
    engine, steps = engines(stage), 8
    for row in range(5):
        params = greedy(50)
        if sampling == "sampled" or (sampling == "mixed" and row % 2):
            params |= {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": row}
        engine.add(prompt(5 + 9 * row, seed=70), params)
    engine.step()
    engine.step()
    with CountReads(DIALECTS[stage].package) as counted:
        for _ in range(steps):
            engine.step()
    searches = sum(count for key, count in counted.reads.items() if key[0] == "memory_pool.py")
    allowed = SEARCHES.get(stage, 0)
    assert allowed is None or searches <= allowed, f"{searches} searches for slots in {steps} steps"
    reads = {key: count for key, count in counted.reads.items() if key[0] != "memory_pool.py"}
    assert sum(reads.values()) == steps, f"host reads in {steps} decode steps: {reads}"
    assert {name for _, name in reads} == {"tolist"}
    run(engine)


def test_the_counter_counts(stage: str) -> None:
    """The mode sees the reads that it is there for."""
    counter = CountReads("tests.shared")
    with counter:
        tensor = torch.arange(3)
        tensor.tolist()
        int(tensor[0])
        bool(tensor[0])
        tensor.nonzero()
        tensor.numpy()
    assert sum(counter.reads.values()) == 5, counter.reads
