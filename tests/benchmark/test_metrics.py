"""Latencies from hand-made timings, and what a run comes to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.v0_2_cudagraph.benchmark.metrics import Arrival, RequestResult, spread, summarise, time_tokens


def arrivals(*pairs: tuple[float, int]) -> list[Arrival]:
    return [Arrival(time, tokens) for time, tokens in pairs]


def test_one_token_an_event() -> None:
    times = time_tokens(10.0, arrivals((10.5, 1), (10.6, 2), (10.9, 3)))
    assert times["ttft"] == 0.5
    assert times["itl"] == pytest.approx([0.1, 0.3])
    assert times["tpot"] == pytest.approx(0.2)
    assert times["latency"] == pytest.approx(0.9)


def test_tokens_of_one_event_share_its_wait() -> None:
    times = time_tokens(0.0, arrivals((1.0, 2), (1.6, 5)))
    assert times["ttft"] == 1.0
    assert times["itl"] == pytest.approx([0.2, 0.2, 0.2])
    assert times["tpot"] == pytest.approx(0.2)


def test_events_without_a_token_count_for_nothing() -> None:
    """A role before the first token, bytes held back, a finish reason after the last token."""
    times = time_tokens(0.0, arrivals((0.1, 0), (1.0, 1), (1.5, 1), (2.0, 2), (9.0, 2)))
    assert (times["ttft"], times["itl"], times["latency"]) == (1.0, [1.0], 2.0)


def test_an_answer_of_one_event_or_of_no_token() -> None:
    assert time_tokens(0.0, arrivals((2.0, 8))) == {"latency": 2.0, "ttft": 2.0, "tpot": None, "itl": []}
    assert time_tokens(0.0, arrivals((2.0, 0))) == {"latency": 2.0, "ttft": None, "tpot": None, "itl": []}


@given(
    st.lists(st.tuples(st.floats(0.001, 10), st.integers(0, 5)), min_size=1, max_size=30),
)
def test_first_token_and_inter_token_latencies_make_up_the_whole(steps: list[tuple[float, int]]) -> None:
    now, count, seen = 0.0, 0, []
    for wait, tokens in steps:
        now, count = now + wait, count + tokens
        seen.append(Arrival(now, count))
    times = time_tokens(0.0, seen)
    if count == 0:
        assert times["ttft"] is None and times["latency"] == now
        return
    first = next(arrival for arrival in seen if arrival.tokens)
    itl = times["itl"]
    assert isinstance(itl, list) and isinstance(times["ttft"], float)
    assert len(itl) == count - first.tokens
    assert times["ttft"] + sum(itl) == pytest.approx(times["latency"])


def test_a_spread_is_in_milliseconds_and_interpolates() -> None:
    found = spread([0.001 * number for number in range(1, 102)])
    assert found is not None
    assert (found.mean, found.median, found.p90, found.p99) == pytest.approx((51.0, 51.0, 91.0, 100.0))
    alone = spread([0.25])
    assert alone is not None and alone.p99 == alone.mean == 250.0
    assert spread([]) is None


def test_failed_requests_are_counted_and_nothing_else_of_them() -> None:
    results = [
        RequestResult(100, 10, 40, latency=2.0, ttft=0.5, tpot=0.1, itl=[0.1] * 9),
        RequestResult(300, 30, 0, latency=4.0, ttft=1.5, tpot=0.3, itl=[0.3] * 29),
        RequestResult(5000, error="HTTP 500"),
    ]
    summary = summarise(results, 8.0)
    assert (summary.completed, summary.failed) == (2, 1)
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (400, 40, 40)
    assert (summary.request_throughput, summary.input_throughput) == (0.25, 50.0)
    assert (summary.output_throughput, summary.total_throughput) == (5.0, 55.0)
    assert summary.concurrency == 0.75
    assert summary.ttft_ms is not None and summary.ttft_ms.mean == pytest.approx(1000.0)
    assert summary.tpot_ms is not None and summary.tpot_ms.mean == pytest.approx(200.0), (
        "every request counts once"
    )
    assert summary.itl_ms is not None and summary.itl_ms.median == pytest.approx(300.0), (
        "every token counts once"
    )
    assert summary.e2e_ms is not None and summary.e2e_ms.median == pytest.approx(3000.0)


def test_a_run_in_which_nothing_ended_has_no_latencies() -> None:
    for results in ([], [RequestResult(5, error="refused")]):
        summary = summarise(results, 0.0)
        assert summary.completed == summary.output_throughput == 0
        assert summary.ttft_ms is summary.itl_ms is summary.tpot_ms is summary.e2e_ms is None
