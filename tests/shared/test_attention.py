"""The attention paths of each stage; those of a GPU under ``cuda``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.v0_1_genesis.layers.radix_attention import RadixAttention as GenesisAttention
from stages.v0_1_genesis.managers.router import model_runner as genesis
from stages.v0_1_genesis.managers.router.infer_batch import ForwardMode as GenesisMode
from stages.v0_1_genesis.memory_pool import ReqToTokenPool, TokenToKVPool
from stages.v0_2_cudagraph.layers.radix_attention import RadixAttention as CudaGraphAttention
from stages.v0_2_cudagraph.managers.controller import input_metadata as cudagraph
from stages.v0_2_cudagraph.managers.controller.infer_batch import ForwardMode as CudaGraphMode

from .contracts.attention import AttentionContract, Case


def genesis_attend(case: Case, attention: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    mode = GenesisMode[case.mode.upper()]
    return attend(case, genesis.InputMetadata, mode, GenesisAttention, attention, device, dtype)


def cudagraph_attend(case: Case, attention: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Whole prompts are an extension of nothing here: PREFILL is gone."""
    mode = CudaGraphMode.DECODE if case.mode == "decode" else CudaGraphMode.EXTEND
    return attend(case, cudagraph.InputMetadata, mode, CudaGraphAttention, attention, device, dtype)


def attend(
    case: Case,
    metadata_class: Any,
    mode: Any,
    layer_class: Any,
    attention: str,
    device: torch.device,
    dtype: Any,
) -> Tensor:
    """The layer over real pools and the real planning; of runner and batch only what planning reads.

    The pools are genesis', whose every slot may hold a token.
    """
    size, kv_heads, dim = case.k_pool.shape
    slots = TokenToKVPool(size, dtype, kv_heads, dim, 1, device)
    slots.k_buffer[0].copy_(case.k_pool)
    slots.v_buffer[0].copy_(case.v_pool)
    rows = ReqToTokenPool(len(case.slots) + 3, size, device)
    row_of = list(range(len(case.slots) + 2, 2, -1))  # rows are not in the batch's order
    for row, sequence in zip(row_of, case.slots, strict=True):
        rows.req_to_token[row, : len(sequence)] = torch.tensor(sequence)
    ints: Any = {"dtype": slots.index_dtype, "device": device}
    seq_lens = [cached + new for cached, new in zip(case.prefix_lens, case.new_lens, strict=True)]
    out = [slot for s, new in zip(case.slots, case.new_lens, strict=True) for slot in s[-new:]]
    batch: Any = SimpleNamespace(
        req_pool_indices=torch.tensor(row_of, **ints),
        seq_lens=torch.tensor(seq_lens, **ints),
        prefix_lens=torch.tensor(case.prefix_lens, **ints),
        seq_lens_cpu=seq_lens,
        prefix_lens_cpu=case.prefix_lens,
        out_cache_loc=torch.tensor(out, **ints),
        out_cache_cont_start=out[0] if case.contiguous else None,
        out_cache_cont_end=out[-1] + 1 if case.contiguous else None,
        return_normalized_logprob=False,
        return_logprob=False,
    )
    runner: Any = SimpleNamespace(
        attention=attention, req_to_token_pool=rows, token_to_kv_pool=slots, dtype=dtype, flashinfer=None
    )
    metadata = metadata_class.create(runner, batch, mode)
    layer = layer_class(case.q.shape[1], dim, kv_heads, 0)
    q, k, v = (tensor.to(device, dtype) for tensor in (case.q, case.k, case.v))
    output: Tensor = layer(q, k, v, metadata)
    case.k_pool, case.v_pool = slots.k_buffer[0], slots.v_buffer[0]
    return output


class TestGenesisTorch(AttentionContract):
    stage = "v0.1"

    @staticmethod
    def attend(case: Case) -> Tensor:
        return genesis_attend(case, "torch", torch.device("cpu"), torch.float32)


@pytest.mark.cuda
class TestGenesisTorchOnCuda(AttentionContract):
    stage = "v0.1"

    @staticmethod
    def attend(case: Case) -> Tensor:
        return genesis_attend(case, "torch", torch.device("cuda"), torch.float32)


@pytest.mark.cuda
class TestGenesisTriton(AttentionContract):
    stage = "v0.1"
    tolerance = 2e-2  # tensor cores multiply float32 as TF32

    @staticmethod
    def attend(case: Case) -> Tensor:
        return genesis_attend(case, "triton", torch.device("cuda"), torch.float32)


class TestCudaGraphTorch(AttentionContract):
    stage = "v0.2"

    @staticmethod
    def attend(case: Case) -> Tensor:
        return cudagraph_attend(case, "torch", torch.device("cpu"), torch.float32)


@pytest.mark.cuda
class TestCudaGraphTriton(AttentionContract):
    stage = "v0.2"
    tolerance = 2e-2  # tensor cores multiply float32 as TF32

    @staticmethod
    def attend(case: Case) -> Tensor:
        return cudagraph_attend(case, "triton", torch.device("cuda"), torch.float32)
