"""`RadixAttention` with the Triton kernels and with plain torch: same batch, same pool, same answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

# Without a GPU the layer leaves its kernels out; under the interpreter they run all the same.
with mock.patch("torch.cuda.is_available", return_value=True):
    from stages.v0_1_genesis.layers import radix_attention, rotary_embedding

from stages.v0_1_genesis.managers.router.infer_batch import ForwardMode
from stages.v0_1_genesis.managers.router.model_runner import InputMetadata
from stages.v0_1_genesis.memory_pool import ReqToTokenPool, TokenToKVPool

from .setting import DEVICE, MARKS, assert_close, index, randn

pytestmark = MARKS
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 32
PREFIX_LENS, NEW_LENS = [0, 20, 3], [17, 1, 30]


def pools() -> tuple[ReqToTokenPool, TokenToKVPool]:
    req_to_token_pool = ReqToTokenPool(4, 60, DEVICE)
    kv_pool = TokenToKVPool(200, torch.float32, KV_HEADS, HEAD_DIM, 1, DEVICE)
    kv_pool.k_buffer[0].copy_(randn(200, KV_HEADS, HEAD_DIM, dtype=torch.float32))
    kv_pool.v_buffer[0].copy_(randn(200, KV_HEADS, HEAD_DIM, dtype=torch.float32))
    slots = torch.randperm(200, device=DEVICE)[: 3 * 60].view(3, 60)
    req_to_token_pool.req_to_token[1:, :60] = slots.to(kv_pool.index_dtype)
    return req_to_token_pool, kv_pool


def batch_of(mode: ForwardMode, req_to_token: torch.Tensor) -> Any:
    prefix_lens = [0] * 3 if mode is ForwardMode.PREFILL else PREFIX_LENS
    new_lens = [1] * 3 if mode is ForwardMode.DECODE else NEW_LENS
    seq_lens = [prefix + new for prefix, new in zip(prefix_lens, new_lens, strict=True)]
    pieces = zip((3, 1, 2), prefix_lens, seq_lens, strict=True)
    return SimpleNamespace(
        seq_lens_cpu=seq_lens,
        prefix_lens_cpu=prefix_lens,
        seq_lens=index(seq_lens),
        prefix_lens=index(prefix_lens),
        req_pool_indices=index([3, 1, 2]),
        out_cache_loc=torch.cat([req_to_token[row, prefix:end] for row, prefix, end in pieces]),
        out_cache_cont_start=None,
        out_cache_cont_end=None,
        return_normalized_logprob=False,
    )


def planned(pools: tuple[ReqToTokenPool, TokenToKVPool], attention: str, mode: ForwardMode) -> InputMetadata:
    req_to_token_pool, kv_pool = pools
    runner: Any = SimpleNamespace(
        attention=attention,
        req_to_token_pool=req_to_token_pool,
        token_to_kv_pool=kv_pool,
        dtype=torch.float32,
        flashinfer=None,
    )
    return InputMetadata.create(runner, batch_of(mode, req_to_token_pool.req_to_token), mode)


@pytest.mark.parametrize("mode", list(ForwardMode))
def test_triton_and_torch_paths_agree(mode: ForwardMode) -> None:
    both_pools = pools()
    plans = [planned(both_pools, attention, mode) for attention in ("torch", "triton")]
    qkv = randn(plans[0].out_cache_loc.numel(), HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.float32)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    layer = radix_attention.RadixAttention(HEADS, HEAD_DIM, KV_HEADS, layer_id=0)
    answers = [layer(q, k, v, plan) for plan in plans]
    assert_close(answers[1], answers[0].double(), torch.float32)


def test_rotation_in_the_storing_launch_is_rotation_before_it() -> None:
    both_pools = pools()
    plan = planned(both_pools, "triton", ForwardMode.EXTEND)
    tokens = plan.out_cache_loc.numel()
    qkv = randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.float32)
    embedding = rotary_embedding.RotaryEmbedding(HEAD_DIM, 64, 10000.0, None).to(DEVICE)
    positions = torch.arange(tokens, device=DEVICE)
    cos, sin = embedding.cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    before = rotary_embedding.Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    within = rotary_embedding.FusedRotation(embedding.cos_sin_cache, positions)
    layer = radix_attention.RadixAttention(HEADS, HEAD_DIM, KV_HEADS, layer_id=0)
    answers = [
        layer(*rotation.split(qkv.clone(), HEADS, KV_HEADS), plan, rotation) for rotation in (before, within)
    ]
    assert_close(answers[1], answers[0].double(), torch.float32)
