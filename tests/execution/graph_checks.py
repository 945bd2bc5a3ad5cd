"""What every replay of v0.2's CudaGraphRunner must be: checked at each decode step of an engine that runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.v0_2_cudagraph.layers.logits_processor import LogitsProcessorOutput
from stages.v0_2_cudagraph.managers.controller.cuda_graph_runner import CudaGraphRunner
from stages.v0_2_cudagraph.managers.controller.infer_batch import Batch, ForwardMode
from stages.v0_2_cudagraph.managers.controller.input_metadata import InputMetadata
from stages.v0_2_cudagraph.managers.controller.model_runner import ModelRunner
from stages.v0_2_cudagraph.memory_pool import TokenToKVPool
from stages.v0_2_cudagraph.support.tape.program import same_bits


def plain_run(runner: ModelRunner, batch: Batch, size: int) -> Tensor:
    """Logits ``[size, vocab]`` of ``batch`` and padding, without any graph or static buffer."""
    surplus = size - len(batch)

    def padded(column: Tensor, value: int = 0) -> Tensor:
        return F.pad(column, (0, surplus), value=value)

    metadata = InputMetadata(
        forward_mode=ForwardMode.DECODE,
        attention=runner.attention,
        batch_size=size,
        total_num_tokens=0,
        max_seq_len=0,
        req_pool_indices=padded(batch.req_pool_indices),
        seq_lens=padded(batch.seq_lens, 1),
        req_to_token=runner.req_to_token_pool.req_to_token,
        token_to_kv_pool=runner.token_to_kv_pool,
        out_cache_loc=padded(batch.out_cache_loc),
        seq_lens_cpu=[],
        flashinfer=runner.flashinfer,
    )
    metadata.replan_decode(batch.seq_lens_cpu + [1] * surplus, runner.dtype)
    output: LogitsProcessorOutput = runner.model(padded(batch.input_ids), padded(batch.positions), metadata)
    return output.next_token_logits


def snapshot(pool: TokenToKVPool) -> list[Tensor]:
    return [buffer.clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]


def restore(pool: TokenToKVPool, saved: list[Tensor]) -> None:
    for buffer, values in zip((*pool.k_buffer, *pool.v_buffer), saved, strict=True):
        buffer.copy_(values)


def check_replay(
    runner: ModelRunner, batch: Batch, output: LogitsProcessorOutput, before: list[Tensor]
) -> None:
    """``output`` is that of a plain run at the padded size, bit by bit, and so are K and V in the pool.

    Nothing but the requests' own new slots and slot 0 was written to (INV-PAD).
    """
    pool = runner.token_to_kv_pool
    assert output.next_token_logits.shape[0] == len(batch), "the surplus rows were not cut off"
    logits, after = output.next_token_logits.clone(), snapshot(pool)
    written = torch.zeros(pool.size + 1, dtype=torch.bool)
    for old, new in zip(before, after, strict=True):
        written |= (old != new).flatten(1).any(dim=1)
    own = set(batch.out_cache_loc.tolist())
    assert set(written.nonzero().flatten().tolist()) <= own | {0}, "a replay wrote to slots of others"
    restore(pool, before)
    assert runner.cuda_graph_runner is not None
    expected = plain_run(runner, batch, runner.cuda_graph_runner.padded_size(len(batch)))
    assert same_bits(logits, expected[: len(batch)]), "the logits are not those of a plain run"
    assert all(map(same_bits, after, snapshot(pool))), "K and V are not those of a plain run"


@contextmanager
def every_replay_checked(runner: ModelRunner) -> Iterator[list[int]]:
    """Check each replay while the block runs; the batch sizes that were replayed."""
    sizes: list[int] = []
    graph_runner = runner.cuda_graph_runner
    assert graph_runner is not None
    replay = graph_runner.replay

    def checked(batch: Batch) -> LogitsProcessorOutput:
        before = snapshot(runner.token_to_kv_pool)
        output = replay(batch)
        check_replay(runner, batch, output, before)
        sizes.append(len(batch))
        return output

    graph_runner.replay = checked  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        del graph_runner.replay
    assert isinstance(graph_runner, CudaGraphRunner)
