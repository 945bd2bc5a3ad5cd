"""One stage's engine on one attention path, driven and timed step by step. Lives for the workloads of a path."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..adapters import DIALECTS, Engine
from .device_trace import DeviceTrace, trace_steps
from .requests import BenchRequest
from .setup import BenchSetup
from .shapes import Shape

TRACED_STEPS = 4


@dataclass
class Steps:
    """The steps of one kind in one drive: wall seconds of each, forwards in all, tokens given, host phases."""

    seconds: list[float] = field(default_factory=list)
    forwards: int = 0
    tokens: int = 0
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.seconds)

    @property
    def median_forward(self) -> float:
        """Seconds of the median step, or the mean forward where a step may hold several."""
        return statistics.median(self.seconds) if self._one_each else self.total / self.forwards

    @property
    def fast_forward(self) -> float | None:
        """Seconds that one step in ten stays below: what the host can do while nothing disturbs it."""
        return sorted(self.seconds)[len(self.seconds) // 10] if self._one_each else None

    @property
    def _one_each(self) -> bool:
        return self.forwards == len(self.seconds)


@dataclass
class Drive:
    """Requests brought from arrival to their last token: the fills apart from the decode steps."""

    fill: Steps
    decode: Steps
    retractions: int

    @property
    def seconds(self) -> float:
        return self.fill.total + self.decode.total


class PathEngine:
    """An engine with dummy weights of ``shape``. It must be idle whenever a method is called."""

    def __init__(self, stage: str, path: str, shape: Shape, folder: Path, setup: BenchSetup) -> None:
        self.name = f"{stage} {path}"
        self.shape, self.device = shape, setup.device
        dialect = DIALECTS[stage]
        self.engine: Engine = dialect.make_engine(
            folder,
            device=setup.device,
            dtype=setup.dtype,
            load_format="dummy",
            max_running_requests=setup.max_running_requests,
            **dialect.path_args(path, setup.device),
            **dict(setup.server_args),
        )
        self.engine.step_timer.enabled = True

    def drive(self, requests: Sequence[BenchRequest], decode_run: int | None = 1) -> Drive:
        """Answer ``requests``, which arrive all at once; ``decode_run`` as in `Engine.set_decode_run`."""
        self.engine.set_decode_run(decode_run)
        self._add(requests)
        fill, decode, unfinished = Steps(), Steps(), len(requests)
        retractions = self.engine.counters["retractions"]
        while unfinished:
            before = self.engine.counters
            self.engine.step_timer.reset()
            started = time.perf_counter()
            events = self.engine.step()
            seconds = time.perf_counter() - started
            after = self.engine.counters
            steps = decode if after["decode_steps"] > before["decode_steps"] else fill
            steps.seconds.append(seconds)
            steps.forwards += int(after["forward_steps"] - before["forward_steps"])
            steps.tokens += int(after["generated_tokens"] - before["generated_tokens"])
            _add_to(steps.phases, self.engine.step_timer.seconds)
            unfinished -= sum(event.finish is not None for event in events)
        self.engine.set_decode_run(1)
        self._forget()
        return Drive(fill, decode, int(self.engine.counters["retractions"] - retractions))

    def trace_fill(self, requests: Sequence[BenchRequest]) -> DeviceTrace | None:
        """What the device does to prefill ``requests`` in one step; None on the CPU."""
        return self._trace(requests, 0, 1)

    def trace_decode(self, requests: Sequence[BenchRequest]) -> DeviceTrace | None:
        """What the device does in a decode step halfway through ``requests``; None on the CPU."""
        return self._trace(requests, 1 + requests[0].new_tokens // 2, TRACED_STEPS)

    def _trace(self, requests: Sequence[BenchRequest], first: int, count: int) -> DeviceTrace | None:
        if self.device != "cuda":
            return None
        rids = self._add(requests)
        for _ in range(first):
            self.engine.step()
        trace = trace_steps(self.engine.step, count)
        for rid in rids:
            self.engine.abort(rid)
        self._forget()
        return trace

    def warm_up(self, requests: Sequence[BenchRequest], new_tokens: int = 4) -> None:
        """Compile and allocate what ``requests`` will need. Twice: the second time the prompts are cached."""
        short = [BenchRequest(request.ids, new_tokens) for request in requests]
        self._add(short)
        self._finish(len(short))
        self._add(short)
        self._finish(len(short))
        self._forget()

    def _add(self, requests: Sequence[BenchRequest]) -> list[str]:
        return [
            self.engine.add(
                request.ids, {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": request.new_tokens}
            )
            for request in requests
        ]

    def _finish(self, unfinished: int) -> None:
        while unfinished:
            unfinished -= sum(event.finish is not None for event in self.engine.step())

    def _forget(self) -> None:
        self.engine.step()  # what was aborted leaves
        self.engine.flush()
        self.engine.step()


def _add_to(totals: dict[str, float], seconds: Mapping[str, float]) -> None:
    for name, value in seconds.items():
        totals[name] = totals.get(name, 0.0) + value
