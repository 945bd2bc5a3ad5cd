"""`bench_latency`: the batch runs as one prefill and single steps, and says what the engine says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.v0_2_cudagraph import bench_latency
from stages.v0_2_cudagraph.benchmark.static_batch import BatchLatency
from stages.v0_2_cudagraph.hf_transformers_utils import get_tokenizer
from stages.v0_2_cudagraph.managers.controller.infer_batch import Batch, ForwardMode
from stages.v0_2_cudagraph.managers.controller.model_runner import ModelRunner
from strata.adapters import DIALECTS
from tests.models.tiny import tiny_llama
from tests.shared.driving import greedy, solo


def bench(model: str, *flags: str) -> int:
    return bench_latency.main(["--model-path", str(tiny_llama(model)), "--device", "cpu", *flags])


def test_each_batch_is_one_prefill_and_single_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, int, int]] = []
    forward = ModelRunner.forward

    def observed(self: ModelRunner, batch: Batch, forward_mode: ForwardMode) -> Any:
        seen.append((forward_mode.name, len(batch), batch.input_ids.numel()))
        return forward(self, batch, forward_mode)

    monkeypatch.setattr(ModelRunner, "forward", observed)
    out = tmp_path / "run.json"
    flags = ("--batch-size", "1", "6", "--input-len", "30", "--output-len", "12", "--output-file", str(out))
    assert bench("qwen2", *flags) == 0

    def one(batch_size: int, output_len: int) -> list[tuple[str, int, int]]:
        decode = ("DECODE", batch_size, batch_size)
        return [("EXTEND", batch_size, 30 * batch_size), *[decode] * (output_len - 1)]

    assert seen == [*one(1, 8), *one(1, 12), *one(6, 8), *one(6, 12)], "cold, after a short warm-up each"
    report = json.loads(out.read_text())
    assert [row["batch_size"] for row in report["batches"]] == [1, 6]
    for row in report["batches"]:
        assert len(row["decode_s"]) == 11 and min(row["decode_s"]) > 0 and row["prefill_s"] > 0
        assert row["decode_throughput"] == pytest.approx(row["batch_size"] / row["decode_median_s"])
    assert report["engine"]["device"] == "cpu" and report["args"]["random_seed"] is not None
    assert "decode tok/s" in capsys.readouterr().out


def test_rates_follow_from_the_times() -> None:
    row = BatchLatency(4, 100, 11, prefill_s=2.0, decode_s=[0.1] * 9 + [5.0])
    assert row.prefill_throughput == 200.0
    assert row.decode_throughput == pytest.approx(40.0), "a step that was disturbed is no rule"
    assert row.total_throughput == pytest.approx(444 / 7.9)
    assert BatchLatency(4, 100, 1, 2.0, []).decode_throughput is None


def test_one_token_needs_no_decode_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("llama", "--input-len", "9", "--output-len", "1") == 0
    assert "–" in capsys.readouterr().out


def test_random_weights_need_no_checkpoint(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_llama("llama") / name).read_bytes())
    flags = ["--model-path", str(tmp_path), "--device", "cpu", "--input-len", "9", "--output-len", "3"]
    assert bench_latency.main([*flags, "--load-format", "dummy"]) == 0


def test_the_correctness_test_prints_the_model_s_own_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three prompts in a batch say what each says alone."""
    out = tmp_path / "run.json"
    assert bench("llama", "--correctness-test", "--output-len", "20", "--output-file", str(out)) == 0
    printed = capsys.readouterr().out
    texts = json.loads(out.read_text())["texts"]
    assert list(texts) == list(bench_latency.CORRECTNESS_PROMPTS)
    engine = DIALECTS["v0.2"].make_engine(tiny_llama("llama"), max_total_tokens=512)
    tokenizer = get_tokenizer(str(tiny_llama("llama")))
    for prompt, text in texts.items():
        assert text == tokenizer.decode(solo(engine, tokenizer.encode(prompt), greedy(20)).ids)
        assert f"{prompt}|" in printed


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--batch-size", "2", "0"], "--batch-size must be at least 1, got 0"),
        (["--output-len", "0"], "--output-len must be at least 1"),
        (["--tp-size", "2"], "--tp-size: this bench is one process"),
        (["--dp-size", "2"], "--dp-size: this bench is one process"),
        (["--input-len", "2040", "--output-len", "9"], "exceed the context length of 2048"),
        (
            ["--batch-size", "9", "--input-len", "100", "--max-total-tokens", "1000"],
            "raise --max-total-tokens",
        ),
        (["--batch-size", "3", "--max-running-requests", "2"], "exceeds --max-running-requests 2"),
        (["--output-file", "/nowhere/run.json"], "--output-file /nowhere/run.json"),
        (["--output-file", "/"], "--output-file / is a folder: name a file in it"),
        (["--max-total-tokens", "1000000000000"], "--max-total-tokens 1000000000000 needs"),
        (["--model-path", "/nowhere"], "--model-path /nowhere is not a folder"),
        (["--context-length", "0"], "--context-length must be at least 2"),
        (["--mem-fraction-static", "0"], "--mem-fraction-static must be in (0, 1), got 0.0"),
        (["--debug-retract-every", "-1"], "--debug-retract-every must be at least 0, got -1"),
    ],
)
def test_what_can_not_be_is_one_line(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("llama", *flags) == 2
    error = capsys.readouterr().err
    [line] = [line for line in error.splitlines() if line.startswith("error: ")]
    assert says in line and "Traceback" not in error
