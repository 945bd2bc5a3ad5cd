"""`strata bench --shape`: fixed workloads, floors that add up, and failures that cost only themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strata.adapters import DIALECTS, existing_stages
from strata.bench import path_command, path_engine, path_workloads
from strata.bench.command import has_path
from strata.bench.device_trace import DeviceTrace, summarize
from strata.bench.floors import Ceilings, Floors
from strata.bench.path_engine import PathEngine
from strata.bench.path_workloads import MIX
from strata.bench.requests import BenchRequest, mix_requests
from strata.bench.setup import BenchSetup
from strata.bench.shapes import SHAPES, write_model_folder
from tests.companion.strata_command import strata

H200 = Ceilings(copy_bytes_per_s=4.27e12, matmul_flops_per_s=785e12)


def test_mix_is_the_one_that_others_were_measured_on() -> None:
    requests = mix_requests(0, *MIX["cuda"], vocab_size=SHAPES["llama-8b"].vocab_size)
    assert sum(len(request.ids) for request in requests) == 142_827
    assert sum(request.new_tokens for request in requests) == 133_966


def test_floors_of_the_8b_shape_are_those_of_the_design() -> None:
    shape = SHAPES["llama-8b"]
    assert shape.step_weights == pytest.approx(7.50e9, rel=1e-3)
    floors = Floors(shape, 2, H200)
    assert 1e3 * floors.decode_step([1]) == pytest.approx(3.52, abs=0.01)
    assert 1e3 * floors.prefill(2048) == pytest.approx(39, abs=0.3)
    requests = mix_requests(0, *MIX["cuda"], vocab_size=shape.vocab_size)
    assert 133_966 / floors.serve(requests, 256) == pytest.approx(13_600, rel=0.02)


def test_serving_is_bound_by_the_longest_answer_or_by_the_running_limit() -> None:
    floors = Floors(SHAPES["tiny"], 4, H200)
    requests = [BenchRequest((1, 2), 9)] * 4
    alone, together = floors.serve(requests, 1), floors.serve(requests, 4)
    steps = (36 - 1) - (9 - 1)
    assert alone - together == pytest.approx(steps * floors.decode_step(()))


def test_counts_what_a_decode_step_reads(tmp_path: Path) -> None:
    """The shape's arithmetic equals the engine's tensors."""
    shape = SHAPES["tiny"]
    write_model_folder(shape, tmp_path)
    engine = PathEngine("v0.1", "torch", shape, tmp_path, BenchSetup(tmp_path, ("v0.1",)))
    runner = engine.engine.runner
    embedding = shape.vocab_size * shape.hidden_size
    assert shape.step_weights == sum(p.numel() for p in runner.model.parameters()) - embedding
    pool = runner.token_to_kv_pool
    slots = sum(buffer[0].numel() for buffer in (*pool.k_buffer, *pool.v_buffer))
    assert shape.cached_per_token == slots


def test_drive_counts_every_token_and_leaves_nothing(tmp_path: Path) -> None:
    write_model_folder(SHAPES["tiny"], tmp_path)
    setup = BenchSetup(tmp_path, ("v0.1",), max_running_requests=3)
    engine = PathEngine("v0.1", "torch", SHAPES["tiny"], tmp_path, setup)
    requests = mix_requests(0, 5, 4, 12, SHAPES["tiny"].vocab_size)
    wanted = sum(request.new_tokens for request in requests)
    for decode_run in (1, None):
        drive = engine.drive(requests, decode_run)
        assert drive.fill.tokens + drive.decode.tokens == wanted
        assert drive.decode.forwards >= max(request.new_tokens for request in requests) - 1
        assert set(drive.decode.phases) >= {"prepare", "forward", "sample", "emit"}
    state = engine.engine.state()
    assert state.free == state.size and not state.nodes[1:]


def test_trace_is_summed_per_step_and_by_kernel() -> None:
    events: list[dict[str, Any]] = [
        {"cat": "kernel", "name": "matmul", "dur": 30.0},
        {"cat": "kernel", "name": "matmul", "dur": 50.0},
        {"cat": "gpu_memcpy", "name": "copy", "dur": 4.0},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 1000.0},
        {"name": "process_name"},
    ]
    trace = summarize(events, steps=2)
    assert trace is not None and summarize(events[3:], steps=2) is None
    assert trace.seconds == pytest.approx(42e-6)
    assert trace.launches == 1.5
    assert trace.kernels == {"matmul": (1.0, 40.0), "copy": (0.5, 2.0)}


def test_launches_per_layer_leave_out_what_is_launched_once_a_step() -> None:
    kernels = {"norm": (65.0, 1.0), "matmul": (128.0, 9.0), "argmax": (1.0, 1.0)}
    assert DeviceTrace(1.0, 194.0, kernels).launches_per_layer(32) == 2 + 4


def test_a_path_may_switch_things_and_a_stage_without_it_is_left_out() -> None:
    assert has_path("v0.2", "flashinfer+no-graphs", "cuda") and not has_path(
        "v0.1", "triton+no-graphs", "cuda"
    )
    assert DIALECTS["v0.2"].path_args("torch+graphs+no-cache", "cpu") == {
        "enable_cpu_graph": True,
        "disable_radix_cache": True,
    }
    assert has_path("v0.1", "torch+no-cache", "cpu") and not has_path("v0.1", "torch+graphs", "cpu")


def test_traced_requests_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the trace itself is made up, all around it is real."""
    traced = []

    def trace_steps(step: Callable[[], object], count: int) -> DeviceTrace:
        traced.append([step() for _ in range(count)])
        return DeviceTrace(1e-3, 20.0, {})

    monkeypatch.setattr(path_engine, "trace_steps", trace_steps)
    write_model_folder(SHAPES["tiny"], tmp_path)
    engine = PathEngine("v0.1", "torch", SHAPES["tiny"], tmp_path, BenchSetup(tmp_path, ("v0.1",)))
    engine.device = "cuda"
    requests = mix_requests(0, 3, 20, 20, SHAPES["tiny"].vocab_size)
    assert engine.trace_decode(requests) == engine.trace_fill(requests)
    assert [len(steps) for steps in traced] == [path_engine.TRACED_STEPS, 1]
    state = engine.engine.state()
    assert not state.requests and state.free == state.size


@pytest.mark.slow
def test_a_failing_workload_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("out of memory\nand much more")

    monkeypatch.setitem(path_workloads.PATH_WORKLOADS, "steady", fails)
    setup = BenchSetup(tmp_path, ("v0.1",), quick=True)
    names = ("stream", "steady", "mix")
    assert not path_command.run_path_bench(names, ["torch"], "tiny", setup, tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    assert [row["workload"] for row in report["rows"]] == ["stream", "mix"]
    [failure] = report["failures"]
    assert failure == {
        "workload": "steady",
        "path": "v0.1 torch",
        "problem": "RuntimeError: out of memory",
    }


@pytest.mark.slow
def test_the_command_reports_all_workloads(tmp_path: Path) -> None:
    json_path = tmp_path / "bench.json"
    ran = strata("bench", "--shape", "tiny", "--quick", "--json", str(json_path), OMP_NUM_THREADS="1")
    assert ran.code == 0, ran
    assert "of floor" in ran.out and "TB/s" in ran.out
    report = json.loads(json_path.read_text())
    assert {"command", "commit", "seed", "versions", "device", "ceilings", "shape"} <= set(report)
    assert [(row["path"], row["workload"]) for row in report["rows"]] == [
        (f"{stage} torch", workload)
        for stage in existing_stages()
        for workload in ("stream", "steady", "steady", "prefill", "mix")
    ]
    assert all(row["tokens_per_s"] > 0 and row["of_floor"] > 0 for row in report["rows"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shape", "llama-900b"], "llama-0.6b"),
        (["--shape", "tiny", "--attention", "triton"], "attention path"),
        (["static", "--shape", "tiny"], "stream, steady, prefill, mix"),
        (["mix"], "steady, static, shared-prefix"),
        (["--shape", "tiny", "--max-running-requests", "0"], "--max-running-requests"),
    ],
    ids=["shape", "path", "workload of models", "workload of shapes", "limit"],
)
def test_a_user_error_is_one_line(arguments: list[str], says: str) -> None:
    ran = strata("bench", *arguments)
    assert ran.is_one_line_error(), ran
    assert says in ran.err
