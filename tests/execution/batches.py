"""A batch as the model sees it, without a scheduler: token lists, and slots strewn over the pool."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from stages.v0_1_genesis.layers.logits_processor import LogitsProcessorOutput
from stages.v0_1_genesis.managers.router.infer_batch import ForwardMode
from stages.v0_1_genesis.managers.router.model_runner import ModelRunner
from stages.v0_1_genesis.model_config import ModelConfig
from stages.v0_1_genesis.server_args import ServerArgs
from tests.models.tiny import tiny_llama

POOL_SIZE = 1000


@cache
def runner(model: str = "llama", **server_args: Any) -> ModelRunner:
    """A runner on a tiny model; made once for the same arguments."""
    return new_runner(str(tiny_llama(model)), **server_args)


def new_runner(folder: str, tp_rank: int = 0, port: int = 0, **server_args: Any) -> ModelRunner:
    args = ServerArgs(folder, device="cpu", **{"max_total_tokens": POOL_SIZE, **server_args})
    return ModelRunner(ModelConfig(folder, args.context_length), args, tp_rank, port)


def prompts(*lengths: int, vocab_size: int = 384, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


RESERVED = 8
"""Slots at the pool's end that `strewn_rows` leaves alone."""


def strewn_rows(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Distinct slots for sequences of these lengths, in no order, all over the pool."""
    slots = list(range(POOL_SIZE - RESERVED))
    random.Random(seed).shuffle(slots)
    return [[slots.pop() for _ in range(length)] for length in lengths]


@dataclass
class FakeBatch:
    """What `InputMetadata.create` and `ModelRunner.forward` read of a Batch."""

    input_ids: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    prefix_lens: Tensor
    seq_lens_cpu: list[int]
    prefix_lens_cpu: list[int]
    out_cache_cont_start: int | None = None
    out_cache_cont_end: int | None = None
    return_normalized_logprob: bool = False
    normalized_logprob_start_lens: tuple[int, ...] = ()


def make_batch(
    model_runner: ModelRunner,
    ids: list[list[int]],
    prefix_lens: list[int],
    rows: list[list[int]],
    **fields: Any,
) -> FakeBatch:
    """Sequences ``ids``, all but their first ``prefix_lens`` tokens new, in the slots ``rows``."""
    spans = [range(prefix, len(seq)) for seq, prefix in zip(ids, prefix_lens, strict=True)]
    seq_lens = [len(seq) for seq in ids]
    for row, (slots, seq_len) in enumerate(zip(rows, seq_lens, strict=True)):
        # Rows are taken from the end, so that a row's number and its place in the batch differ.
        table_row = model_runner.req_to_token_pool.req_to_token[-1 - row]
        table_row[:seq_len] = torch.tensor(slots[:seq_len])
    table_size = model_runner.req_to_token_pool.size
    return FakeBatch(
        input_ids=torch.tensor([seq[i] for seq, span in zip(ids, spans, strict=True) for i in span]),
        positions=torch.tensor([i for span in spans for i in span]),
        out_cache_loc=torch.tensor([slots[i] for slots, span in zip(rows, spans, strict=True) for i in span]),
        req_pool_indices=torch.arange(table_size - 1, table_size - 1 - len(ids), -1),
        seq_lens=torch.tensor(seq_lens),
        prefix_lens=torch.tensor(prefix_lens),
        seq_lens_cpu=seq_lens,
        prefix_lens_cpu=prefix_lens,
        **fields,
    )


def poison(model_runner: ModelRunner) -> None:
    """Fill the pool with NaN: what a forward pass reads it must have written (INV-NAN)."""
    pool = model_runner.token_to_kv_pool
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.fill_(torch.nan)


@torch.inference_mode()
def forward(
    model_runner: ModelRunner,
    mode: ForwardMode,
    ids: list[list[int]],
    prefix_lens: list[int],
    rows: list[list[int]],
    **fields: Any,
) -> LogitsProcessorOutput:
    batch: Any = make_batch(model_runner, ids, prefix_lens, rows, **fields)
    return model_runner.forward(batch, mode)


def prefill(model_runner: ModelRunner, ids: list[list[int]], rows: list[list[int]]) -> LogitsProcessorOutput:
    return forward(model_runner, ForwardMode.PREFILL, ids, [0] * len(ids), rows)


@cache
def _reference_model(folder: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@torch.inference_mode()
def reference_logits(folder: str, ids: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Transformers' logits after every token: float32 ``[tokens, vocab]``."""
    return _reference_model(folder, dtype)(torch.tensor([ids])).logits[0].float()
