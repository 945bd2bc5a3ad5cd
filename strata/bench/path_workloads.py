"""The workloads of DESIGN §12 for one engine on one attention path: stream, steady, prefill, mix.

Prompts differ from run to run within a workload, so that no prefix is ever cached. The numbers of a workload
come from steps as they are in a server, with the profiler off; the device's share of a decode step is then
traced in a run of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from .device_trace import DeviceTrace
from .floors import Floors
from .path_engine import Drive, PathEngine, Steps
from .requests import BenchRequest, equal_requests, mix_requests
from .setup import BenchSetup

WARM_UP_REQUESTS = 8
MIX = {"cuda": (256, 100, 1024), "cpu": (64, 25, 256)}
"""Number of requests, and both bounds of their lengths in and out."""


@dataclass(frozen=True)
class PathRow:
    """One line of the report. Times are in milliseconds; a step is a decode forward, in prefill the fill.

    ``step_ms`` is the median; a tenth of the steps stays below ``fast_step_ms``. ``phases_ms`` are the host's
    means, the wait for the device being in sample.
    ``floor_ms`` is what the memory's bandwidth allows for the step (prefill: what matrix products allow), and
    ``of_floor`` the share of that speed reached; in mix it is of the whole run. ``device_ms``, ``launches``
    and ``kernels`` are of one step, from a trace; ``host_gap_ms`` is what the step takes beyond the device.
    """

    workload: str
    case: str
    path: str
    tokens_per_s: float
    step_ms: float
    fast_step_ms: float | None
    phases_ms: dict[str, float]
    floor_ms: float | None = None
    of_floor: float | None = None
    device_ms: float | None = None
    host_gap_ms: float | None = None
    launches: float | None = None
    launches_per_layer: int | None = None
    kernels: dict[str, tuple[float, float]] = field(default_factory=dict)
    more: dict[str, float] = field(default_factory=dict)

    @property
    def idle_ms(self) -> float:
        """Host time of a step in which the device has nothing to do, whatever is launched: part of the gap."""
        return sum(self.phases_ms.get(name, 0.0) for name in ("schedule", "prepare", "emit"))

    @property
    def scheduler_ms(self) -> float:
        """What a step costs beside the forward pass; on a GPU with the wait for the device, which is in sample."""
        return sum(ms for name, ms in self.phases_ms.items() if name != "forward")


Workload = Callable[[BenchSetup, PathEngine, Floors], Iterator[PathRow]]


def stream(setup: BenchSetup, engine: PathEngine, floors: Floors) -> Iterator[PathRow]:
    """One request: 128 tokens in, 256 out. Its rate counts the prefill, too."""
    length, new_tokens, rounds = (16, 16, 1) if setup.quick else (128, 256, 3)
    warm_up, traced, *measured = (
        _equal(setup, engine, f"stream/{i}", 1, length, new_tokens) for i in range(2 + rounds)
    )
    engine.warm_up(warm_up)
    drive = _median([engine.drive(requests) for requests in measured])
    row = _row("stream", f"{length}+{new_tokens}", engine, drive.decode, engine.trace_decode(traced))
    yield replace(
        _with_floor(row, floors.decode_step([length + new_tokens // 2])),
        tokens_per_s=new_tokens / drive.seconds,
        more={"ttft_ms": 1e3 * drive.fill.total},
    )


def steady(setup: BenchSetup, engine: PathEngine, floors: Floors) -> Iterator[PathRow]:
    """Decoding alone at fixed batch sizes: 128 tokens in, 128 out, the first token's step not counted."""
    length, new_tokens, batches = (16, 16, (1, 4)) if setup.quick else (128, 128, (1, 8, 32, 128))
    for batch in batches:
        if batch > (setup.max_running_requests or batch):
            continue
        warm_up, traced, measured = (
            _equal(setup, engine, f"steady/{i}", batch, length, new_tokens) for i in range(3)
        )
        engine.warm_up(warm_up)
        decode = engine.drive(measured).decode
        row = _row("steady", f"batch {batch}", engine, decode, engine.trace_decode(traced))
        yield _with_floor(row, floors.decode_step([length + new_tokens // 2] * batch))


def prefill(setup: BenchSetup, engine: PathEngine, floors: Floors) -> Iterator[PathRow]:
    """One prompt of 2,048 tokens, of which nothing is cached, up to its first token."""
    length, rounds = (64, 1) if setup.quick else (2048, 7)
    warm_up, traced, *measured = (
        _equal(setup, engine, f"prefill/{i}", 1, length, 1) for i in range(2 + rounds)
    )
    engine.warm_up(warm_up)
    fill = _median([engine.drive(requests) for requests in measured]).fill
    row = _row("prefill", f"{length} tokens", engine, fill, engine.trace_fill(traced))
    yield replace(_with_floor(row, floors.prefill(length)), tokens_per_s=length / fill.total)


def mix(setup: BenchSetup, engine: PathEngine, floors: Floors) -> Iterator[PathRow]:
    """256 requests of 100 to 1,024 tokens in and out, which arrive at once and are served as in a server.

    On the CPU a scaled-down mix.
    """
    count, shortest, longest = MIX[setup.device] if not setup.quick else (12, 4, 24)
    warm_up, requests = (
        mix_requests(seed, number, shortest, longest, engine.shape.vocab_size)
        for seed, number in ((setup.seed + 1, WARM_UP_REQUESTS), (setup.seed, count))
    )
    engine.warm_up(warm_up)
    drive = engine.drive(requests, decode_run=None)
    running = min(setup.max_running_requests or count, count)
    floor = floors.serve(requests, running)
    new_tokens = sum(request.new_tokens for request in requests)
    yield replace(
        _row("mix", f"{count}, {running} at once", engine, drive.decode),
        tokens_per_s=new_tokens / drive.seconds,
        of_floor=floor / drive.seconds,
        more={
            "input_tokens": sum(len(request.ids) for request in requests),
            "output_tokens": new_tokens,
            "seconds": drive.seconds,
            "floor_s": floor,
            "fills": drive.fill.forwards,
            "fill_s": drive.fill.total,
            "decode_steps": drive.decode.forwards,
            "decode_s": drive.decode.total,
            "retractions": drive.retractions,
        },
    )


PATH_WORKLOADS: dict[str, Workload] = {"stream": stream, "steady": steady, "prefill": prefill, "mix": mix}


def _equal(
    setup: BenchSetup, engine: PathEngine, name: str, count: int, length: int, new_tokens: int
) -> list[BenchRequest]:
    return equal_requests(f"{name}/{setup.seed}", count, length, new_tokens, engine.shape.vocab_size)


def _median(drives: Sequence[Drive]) -> Drive:
    return sorted(drives, key=lambda drive: drive.seconds)[len(drives) // 2]


def _row(
    workload: str, case: str, engine: PathEngine, steps: Steps, trace: DeviceTrace | None = None
) -> PathRow:
    step_ms = 1e3 * steps.median_forward
    fast_step_ms = None if steps.fast_forward is None else 1e3 * steps.fast_forward
    phases_ms = {name: 1e3 * seconds / steps.forwards for name, seconds in steps.phases.items()}
    row = PathRow(workload, case, engine.name, steps.tokens / steps.total, step_ms, fast_step_ms, phases_ms)
    if trace is None:
        return row
    device_ms = 1e3 * trace.seconds
    return replace(
        row,
        device_ms=device_ms,
        host_gap_ms=step_ms - device_ms,
        launches=trace.launches,
        launches_per_layer=trace.launches_per_layer(engine.shape.num_hidden_layers),
        kernels=trace.kernels,
    )


def _with_floor(row: PathRow, seconds: float) -> PathRow:
    return replace(row, floor_ms=1e3 * seconds, of_floor=1e3 * seconds / row.step_ms)
