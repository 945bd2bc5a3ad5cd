"""From the times at which tokens arrived to the numbers of a report. Pure functions; all times in seconds.

Objects live as long as one run of the benchmark.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np


@dataclass(frozen=True)
class RequestResult:
    """One request's fate. Where ``error`` says something it failed, and its numbers count for nothing."""

    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    latency: float = 0.0
    """From sending the request to its last token."""
    ttft: float | None = None
    """From sending the request to its first token; None where there was none."""
    tpot: float | None = None
    """Mean time of a token after the first ones; None where all came at once."""
    itl: list[float] = field(default_factory=list)
    """For each token after the first ones, its share of the wait for the event that brought it."""
    error: str = ""


@dataclass(frozen=True)
class Arrival:
    """An event of a stream: when it came, and how many tokens had come by then."""

    time: float
    tokens: int


def time_tokens(sent: float, arrivals: Sequence[Arrival]) -> dict[str, float | list[float] | None]:
    """``latency``, ``ttft``, ``tpot`` and ``itl`` of a request sent at ``sent``; ``arrivals`` is not empty.

    An event may bring several tokens, or none. What the first one with any brings has no inter-token latency.
    """
    latest: Arrival | None = None
    ttft: float | None = None
    itl: list[float] = []
    for arrival in arrivals:
        if arrival.tokens <= (latest.tokens if latest else 0):
            continue
        if latest is None:
            ttft = arrival.time - sent
        else:
            count = arrival.tokens - latest.tokens
            itl += [(arrival.time - latest.time) / count] * count
        latest = arrival
    return {
        "latency": (latest or arrivals[-1]).time - sent,
        "ttft": ttft,
        "tpot": statistics.fmean(itl) if itl else None,
        "itl": itl,
    }


@dataclass(frozen=True)
class Spread:
    """Of one quantity over all requests or tokens, in milliseconds."""

    mean: float
    median: float
    p90: float
    p99: float


def spread(seconds: Sequence[float]) -> Spread | None:
    """None where there is nothing to summarise."""
    if not seconds:
        return None
    median, p90, p99 = np.percentile(seconds, (50, 90, 99)) * 1000
    return Spread(statistics.fmean(seconds) * 1000, float(median), float(p90), float(p99))


@dataclass(frozen=True)
class Summary:
    """What a run comes to; tokens and rates are those of completed requests alone."""

    duration_s: float
    completed: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    request_throughput: float
    """Requests a second; the next three are tokens a second."""
    input_throughput: float
    output_throughput: float
    total_throughput: float
    concurrency: float
    """Requests under way, on average over the run."""
    ttft_ms: Spread | None
    itl_ms: Spread | None
    tpot_ms: Spread | None
    e2e_ms: Spread | None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def summarise(results: Sequence[RequestResult], duration: float) -> Summary:
    """The numbers of a run that took ``duration`` from its first request to its last token."""
    done = [result for result in results if not result.error]
    prompt_tokens = sum(result.prompt_tokens for result in done)
    output_tokens = sum(result.output_tokens for result in done)

    def rate(count: float) -> float:
        return count / duration if duration > 0 else 0.0

    return Summary(
        duration_s=duration,
        completed=len(done),
        failed=len(results) - len(done),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(result.cached_tokens for result in done),
        output_tokens=output_tokens,
        request_throughput=rate(len(done)),
        input_throughput=rate(prompt_tokens),
        output_throughput=rate(output_tokens),
        total_throughput=rate(prompt_tokens + output_tokens),
        concurrency=rate(sum(result.latency for result in done)),
        ttft_ms=spread([result.ttft for result in done if result.ttft is not None]),
        itl_ms=spread([latency for result in done for latency in result.itl]),
        tpot_ms=spread([result.tpot for result in done if result.tpot is not None]),
        e2e_ms=spread([result.latency for result in done]),
    )
