"""`strata bench` against transformers: what it measures is right, and what it writes can be read later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata.bench.measure import Row, interleave
from strata.bench.report import table
from strata.bench.requests import equal_requests, mixed_requests
from tests.companion.strata_command import strata
from tests.models.tiny import tiny_llama


class Clock:
    """A contender that only notes when it is asked."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self._calls = name, calls

    def measure(self) -> float:
        self._calls.append(self.name)
        return float(len(self._calls))


def test_contenders_take_turns() -> None:
    calls = list[str]()
    values = interleave([Clock("a", calls), Clock("b", calls)], 2, lambda clock: clock.measure())  # type: ignore
    assert calls == ["a", "b", "a", "b"]
    assert values == {"a": [1.0, 3.0], "b": [2.0, 4.0]}


@pytest.mark.parametrize(("better", "expected"), [("higher", 4.0), ("lower", 0.25)])
def test_times_faster_knows_which_way_is_better(better: str, expected: float) -> None:
    row = Row("w", "c", "u", better, {"v0.1": [9.0, 8.0, 7.0], "transformers": [2.0]})  # type: ignore[arg-type]
    assert row.times_faster("v0.1", "transformers") == expected


def test_a_row_without_a_peer_still_has_a_table() -> None:
    rows = [
        Row("w", "c", "u", "higher", {"v0.1": [1.0]}, limit=2.0),
        Row("w", "d", "u", "lower", {"v0.2": [1.0]}),
    ]
    assert table(rows).row_count == 2


def test_requests_depend_on_the_seed_alone() -> None:
    first = mixed_requests(0, 32, range(16, 129), range(16, 257), vocab_size=49152)
    assert first == mixed_requests(0, 32, range(16, 129), range(16, 257), vocab_size=49152)
    assert first != mixed_requests(1, 32, range(16, 129), range(16, 257), vocab_size=49152)
    wanted = sorted(request.new_tokens for request in first)
    assert (wanted[0], wanted[-1], len(wanted)) == (16, 256, 32)
    assert len({request.ids for request in equal_requests(0, 8, 16, 4, vocab_size=512)}) == 8


@pytest.mark.slow
def test_a_quick_run_agrees_with_transformers_and_is_written(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    folder = str(tiny_llama("llama"))
    ran = strata("bench", "--quick", "--model-path", folder, "--json", str(out), timeout=250)
    assert ran.code == 0, ran
    report = json.loads(out.read_text())
    assert [row["workload"] for row in report["rows"]] == ["steady"] * 3 + ["static"] + ["shared-prefix"] * 2
    for row in report["rows"]:
        assert all(value > 0 for values in row["values"].values() for value in values)
        assert "transformers" in row["medians"]
    assert [row["note"] for row in report["rows"][:3]] == [
        f"{count} of {count} tokens equal" for count in (16, 8 * 16, 32 * 16)
    ]
    assert report["seed"] == 0 and report["versions"]["torch"] and report["device"]["threads"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "steady"),
        (["--stages", "v9"], "v9"),
        (["--model-path", "/nowhere"], "config.json"),
        (["--device", "tpu"], "--device"),
    ],
    ids=["workload", "stage", "model", "device"],
)
def test_wrong_arguments_are_one_line(arguments: list[str], says: str) -> None:
    ran = strata("bench", *arguments)
    assert ran.is_one_line_error() and says in ran.err, ran
