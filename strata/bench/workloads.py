"""The workloads of DESIGN §12 that run in one process. Each takes the contenders and returns its rows."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable, Iterator, Sequence

from .contenders import Contender, vocab_size
from .limits import Limits
from .measure import Row, interleave
from .requests import BenchRequest, equal_requests, mixed_requests, random_ids
from .setup import BenchSetup

Workload = Callable[[BenchSetup, Sequence[Contender], Limits | None], Iterator[Row]]

BATCH_SIZES = (1, 8, 32)
PREFIX_LENGTH, QUESTION_LENGTH = 1000, 24


def steady(setup: BenchSetup, contenders: Sequence[Contender], limits: Limits | None) -> Iterator[Row]:
    """Decoding alone, at fixed batch sizes: 128 tokens in, 64 out, the first token's step not counted."""
    length, new_tokens = (32, 16) if setup.quick else (128, 64)
    for batch in BATCH_SIZES:
        requests = equal_requests(setup.seed, batch, length, new_tokens, vocab_size(setup))
        outputs: dict[str, list[list[int]]] = {}

        def rate(contender: Contender, requests: Sequence[BenchRequest] = requests) -> float:
            contender.forget()
            seconds, outputs[contender.name] = contender.decode(requests)  # noqa: B023 (called in this turn)
            return len(requests) * (requests[0].new_tokens - 1) / seconds

        _warm_up(contenders, requests)
        values = interleave(contenders, setup.rounds, rate)
        limit = limits.steps_per_s * batch if limits else None
        yield Row("steady", f"batch {batch}", "tok/s", "higher", values, limit, _agreement(outputs))


def static(setup: BenchSetup, contenders: Sequence[Contender], limits: Limits | None) -> Iterator[Row]:
    """A list of 32 requests that want 16 to 256 tokens, where a static batch waits for the longest."""
    shapes = (range(8, 33), range(4, 33)) if setup.quick else (range(16, 129), range(16, 257))
    requests = mixed_requests(setup.seed, 32, *shapes, vocab_size(setup))
    wanted = sum(request.new_tokens for request in requests)

    def rate(contender: Contender) -> float:
        contender.forget()
        return wanted / contender.answer(requests)

    _warm_up(contenders, requests[:4])
    values = interleave(contenders, setup.slow_rounds, rate)
    yield Row("static", f"32 requests, {wanted} tokens", "tok/s", "higher", values)


def shared_prefix(setup: BenchSetup, contenders: Sequence[Contender], limits: Limits | None) -> Iterator[Row]:
    """Time to first token of two requests that share a 1,000-token prefix, the second after the first."""
    rng = random.Random(f"prefix/{setup.seed}")
    prefix = random_ids(rng, PREFIX_LENGTH, vocab_size(setup))
    questions = [random_ids(rng, QUESTION_LENGTH, vocab_size(setup)) for _ in range(2)]
    second: dict[str, list[float]] = {contender.name: [] for contender in contenders}

    def ttft(contender: Contender) -> float:
        contender.forget()
        milliseconds = [1000 * contender.first_token(prefix + question) for question in questions]
        second[contender.name].append(milliseconds[1])
        return milliseconds[0]

    _warm_up(contenders, [BenchRequest(prefix, 2)])
    first = interleave(contenders, setup.rounds, ttft)
    yield Row("shared-prefix", "first request", "TTFT ms", "lower", first)
    row = Row("shared-prefix", "second request", "TTFT ms", "lower", second)
    shares = [f"{stage} {row.median(stage) / statistics.median(first[stage]):.3f}" for stage in setup.stages]
    yield dataclasses.replace(row, note=f"of the first: {', '.join(shares)}")


WORKLOADS: dict[str, Workload] = {"steady": steady, "static": static, "shared-prefix": shared_prefix}


def _warm_up(contenders: Sequence[Contender], requests: Sequence[BenchRequest]) -> None:
    """First calls allocate and compile; they are nobody's speed."""
    short = [BenchRequest(request.ids, 4) for request in requests]
    for contender in contenders:
        contender.answer(short)


def _agreement(outputs: dict[str, list[list[int]]]) -> str:
    """How many tokens are the same for all contenders: near ties aside, all of them."""
    if len(outputs) < 2:
        return ""
    rows = list(zip(*outputs.values(), strict=True))
    equal = sum(len(set(tokens)) == 1 for row in rows for tokens in zip(*row, strict=True))
    total = sum(len(row[0]) for row in rows)
    return f"{equal} of {total} tokens equal"
