"""v0.2's CudaGraphRunner on the CPU's tapes: replays are plain runs, and the checks see what would make them none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from stages.v0_2_cudagraph.layers.logits_processor import LogitsProcessorOutput
from stages.v0_2_cudagraph.managers.controller.cuda_graph_runner import CAPTURE_SIZES, CudaGraphRunner
from stages.v0_2_cudagraph.managers.controller.infer_batch import Batch, ForwardMode
from stages.v0_2_cudagraph.managers.controller.input_metadata import InputMetadata
from stages.v0_2_cudagraph.managers.controller.static_inputs import StaticInputs
from stages.v0_2_cudagraph.models.llama2 import LlamaForCausalLM
from stages.v0_2_cudagraph.support.graph_tape import CaptureError
from strata.adapters.v0_2 import CudaGraphEngine
from tests.models.tiny import tiny_llama
from tests.shared.driving import greedy, prompt, run

from .graph_checks import every_replay_checked

POOL_SIZE = 2048


@pytest.fixture(scope="module")
def engine() -> CudaGraphEngine:
    return new_engine()


def new_engine(**server_args: Any) -> CudaGraphEngine:
    return CudaGraphEngine(
        tiny_llama("llama"), **{"max_total_tokens": POOL_SIZE, "enable_cpu_graph": True, **server_args}
    )


def decode(engine: CudaGraphEngine, num_requests: int, new_tokens: int = 4) -> list[int]:
    """Run so many requests of mixed lengths with every replay checked; the batch sizes replayed."""
    for i in range(num_requests):
        engine.add(prompt(2 + i % 9, seed=i), greedy(new_tokens))
    with every_replay_checked(engine.runner) as sizes:
        run(engine)
    return sizes


@pytest.mark.parametrize("batch_size", [1, 3, 5, 65, 127, 128])
def test_replays_are_plain_runs_at_the_padded_size(engine: CudaGraphEngine, batch_size: int) -> None:
    assert decode(engine, batch_size) == [batch_size] * 3


def test_a_batch_above_the_largest_size_runs_eagerly(engine: CudaGraphEngine) -> None:
    replays, steps = engine.counters["graph_replays"], engine.counters["decode_steps"]
    assert decode(engine, 129) == []
    assert engine.counters["graph_replays"] == replays
    assert engine.counters["decode_steps"] == steps + 3


def test_batches_that_shrink_and_grow_find_no_trace_of_the_one_before(engine: CudaGraphEngine) -> None:
    for i in range(20):
        engine.add(prompt(40 - 2 * i, seed=i), greedy(1 + i))
    with every_replay_checked(engine.runner) as sizes:
        run(engine)
    assert sizes == list(range(19, 0, -1))
    assert decode(engine, 7, new_tokens=12) == [7] * 11


def test_sizes_are_those_of_history_as_far_as_they_are_needed() -> None:
    assert CAPTURE_SIZES == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128)
    assert new_engine(max_running_requests=5).runner.cuda_graph_runner.sizes == [1, 2, 4, 8]
    assert new_engine(max_total_tokens=5).runner.cuda_graph_runner.sizes == [1, 2, 4]


def test_a_capture_leaves_the_pools_untouched(engine: CudaGraphEngine) -> None:
    runner = new_engine().runner
    assert not runner.req_to_token_pool.req_to_token.any()
    assert not any(buffer.any() for buffer in runner.token_to_kv_pool.k_buffer)
    assert not any(buffer.any() for buffer in runner.token_to_kv_pool.v_buffer)


def test_every_rank_makes_up_the_same_and_never_the_same_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that made up tokens of their own failed to start whenever no rank had the embedding of its own."""
    seen: list[list[torch.Tensor]] = []
    make_up = CudaGraphRunner._make_up

    def observed(self: CudaGraphRunner, size: int) -> None:
        make_up(self, size)
        table = self.model_runner.req_to_token_pool.req_to_token[:size, :8]
        seen.append([self.inputs._buffer[:, :size].clone(), table.clone()])

    monkeypatch.setattr(CudaGraphRunner, "_make_up", observed)
    for seed in range(2):  # torch's own generator is another one in every process
        torch.manual_seed(seed)
        CudaGraphEngine(
            tiny_llama("llama"),
            max_total_tokens=100,
            max_running_requests=4,
            enable_cpu_graph=True,
            random_seed=7,
        )
    one, other = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert len(one) == 2 * 3
    for ours, theirs in zip(one, other, strict=True):
        assert all(map(torch.equal, ours, theirs))
    for before, after in zip(one[::2], one[1::2], strict=True):
        assert (before[0][0] != after[0][0]).all()


def test_start_up_reports_every_size(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="stages.v0_2_cudagraph"):
        new_engine(max_running_requests=2)
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("captured batch size 2 (2 of 2) in ") for line in lines)
    assert any(line.startswith("captured 2 graphs in ") for line in lines)


def test_compiling_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="--enable-torch-compile compiles what CUDA graphs capture"):
        new_engine(enable_torch_compile=True)


@pytest.mark.cuda
@pytest.mark.timeout(600)  # FlashInfer compiles its kernels when they are first planned
@pytest.mark.parametrize("batch_size", [1, 3, 5, 65, 127, 128, 129])
def test_on_a_gpu_graphs_change_no_logits(batch_size: int) -> None:
    """As a plain run at the real size: other kernels may serve it, so within a bfloat16's rounding."""
    engine = new_gpu_engine()
    runner = engine.runner
    for i in range(batch_size):
        engine.add(prompt(2 + i % 9, seed=i), greedy(4))
    replay, worst = runner.cuda_graph_runner.replay, []

    def compared(batch: Batch) -> LogitsProcessorOutput:
        logits = replay(batch).next_token_logits.clone()
        metadata = InputMetadata.create(runner, batch, ForwardMode.DECODE)
        expected = runner.model(batch.input_ids, batch.positions, metadata).next_token_logits
        worst.append(float((logits - expected).abs().max() / expected.abs().max()))
        return LogitsProcessorOutput(logits)

    before = engine.counters["graph_replays"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.cuda_graph_runner, "replay", compared)
        run(engine)
    assert engine.counters["graph_replays"] - before == len(worst) == (3 if batch_size <= 128 else 0)
    assert all(error < 2e-2 for error in worst), worst


@cache
def new_gpu_engine() -> CudaGraphEngine:
    return CudaGraphEngine(
        tiny_llama("llama-hd64"), device="cuda", dtype="bfloat16", max_total_tokens=POOL_SIZE
    )


@pytest.mark.cuda
@pytest.mark.slow
def test_a_compiled_model_says_the_same() -> None:
    texts = []
    for compiled in (False, True):
        engine = CudaGraphEngine(
            tiny_llama("llama-hd64"),
            device="cuda",
            dtype="bfloat16",
            max_total_tokens=POOL_SIZE,
            max_running_requests=2,
            enable_torch_compile=compiled,
        )
        rids = [engine.add(prompt(9, seed=i), greedy(8)) for i in range(2)]
        answers = run(engine)
        texts.append([answers[rid].ids for rid in rids])
        assert engine.counters["graph_replays"] == engine.counters["decode_steps"] > 0
    assert texts[0] == texts[1]


# -- mutants of the runner: each must fail the check that is there for it ------------------------------------


def stale_buffer(patch: pytest.MonkeyPatch) -> None:
    """Lengths of the step before stay in the buffer that the graph reads."""
    fill = StaticInputs.fill

    def mutant(self: StaticInputs, batch: Batch, size: int) -> None:
        positions = self.positions.clone()
        fill(self, batch, size)
        self.positions.copy_(positions)

    patch.setattr(StaticInputs, "fill", mutant)


def changed_address(patch: pytest.MonkeyPatch) -> None:
    """The inputs are right, but in a new tensor, which the graph has never seen."""

    def mutant(self: StaticInputs, batch: Batch, size: int) -> None:
        fresh = StaticInputs(len(self.input_ids), self.input_ids.dtype, self.input_ids.device)
        StaticInputs.original_fill(fresh, batch, size)  # type: ignore[attr-defined]
        vars(self).update(vars(fresh))

    patch.setattr(StaticInputs, "original_fill", StaticInputs.fill, raising=False)
    patch.setattr(StaticInputs, "fill", mutant)


def unpadded_row(patch: pytest.MonkeyPatch) -> None:
    """Surplus rows keep what a larger batch left there, and write to its slots."""
    fill = StaticInputs.fill
    patch.setattr(StaticInputs, "fill", lambda self, batch, size: fill(self, batch, len(batch)))


def surplus_not_cut(patch: pytest.MonkeyPatch) -> None:
    replay = CudaGraphRunner.replay

    def mutant(self: CudaGraphRunner, batch: Batch) -> LogitsProcessorOutput:
        replay(self, batch)
        return self.outputs[self.padded_size(len(batch))]

    patch.setattr(CudaGraphRunner, "replay", mutant)


def stale_plan(patch: pytest.MonkeyPatch) -> None:
    """Attention goes by the lengths of the capture."""
    name = "stages.v0_2_cudagraph.support.paged_decode.DecodePlan.replace"
    patch.setattr(name, lambda self, other: None)


def slot_zero_given_away(patch: pytest.MonkeyPatch) -> None:
    """Padding writes to slot 1, which a request may have."""
    name = "stages.v0_2_cudagraph.managers.controller.static_inputs.PADDING"
    padding = {"input_ids": 0, "positions": 0, "req_pool_indices": 0, "seq_lens": 1, "out_cache_loc": 1}
    patch.setattr(name, padding)


MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    stale_buffer: "plain run",
    changed_address: "slots of others|plain run",
    unpadded_row: "slots of others|plain run",
    surplus_not_cut: "not cut off",
    slot_zero_given_away: "slots of others",
    stale_plan: "plain run",
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutants_of_the_runner_are_caught(mutant: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        engine = new_engine()
        with pytest.raises(AssertionError, match=MUTANTS[mutant]):
            for batch_size in (8, 5):
                decode(engine, batch_size)


# -- reads on the host inside the captured region --------------------------------------------------------------


def item(hidden: torch.Tensor, metadata: Any) -> torch.Tensor:
    return hidden * float(metadata.seq_lens[0].item() > 0)


def tolist(hidden: torch.Tensor, metadata: Any) -> torch.Tensor:
    return hidden + max(metadata.seq_lens.tolist())


def numpy(hidden: torch.Tensor, metadata: Any) -> torch.Tensor:
    return hidden + float(metadata.seq_lens.numpy().sum())


def branch(hidden: torch.Tensor, metadata: Any) -> torch.Tensor:
    return hidden + 1 if metadata.seq_lens[0] > 3 else hidden


def boolean_index(hidden: torch.Tensor, metadata: Any) -> torch.Tensor:
    return hidden + hidden[metadata.seq_lens > 3].sum()


def data_dependent_shape(hidden: torch.Tensor, metadata: Any) -> torch.Tensor:
    return hidden + metadata.seq_lens.unique().numel()


def host_mirror(hidden: torch.Tensor, metadata: Any) -> torch.Tensor:
    """No tensor is read: the value was one on the host all along, and freezes without a sound."""
    return hidden + metadata.max_seq_len


READS = (item, tolist, numpy, branch, boolean_index, data_dependent_shape, host_mirror)


@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
def test_a_read_on_the_host_ends_the_capture(read: Callable[..., torch.Tensor]) -> None:
    forward = LlamaForCausalLM.forward

    def planted(self: Any, input_ids: torch.Tensor, positions: torch.Tensor, metadata: Any) -> Any:
        output = forward(self, input_ids, positions, metadata)
        return LogitsProcessorOutput(read(output.next_token_logits, metadata))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "forward", planted)
        torch.manual_seed(0)
        with pytest.raises(CaptureError):
            new_engine(max_running_requests=4)
