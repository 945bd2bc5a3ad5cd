"""The fused elementwise kernels and the logprob gather against plain torch."""

from __future__ import annotations

import pytest
import torch

from stages.v0_1_genesis.layers.fused_activation import silu_and_mul
from stages.v0_1_genesis.layers.fused_layernorm import fused_add_rmsnorm, rmsnorm
from stages.v0_1_genesis.layers.fused_rotary import rotate_and_store
from stages.v0_1_genesis.layers.get_selected_logprob import get_selected_logprob
from stages.v0_1_genesis.layers.store_kv import store_kv

from .setting import DEVICE, DTYPES, MARKS, assert_close, index, randn, sizes

pytestmark = MARKS


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", sizes([576], [4096, 8192, 5120]))
def test_rmsnorm_with_and_without_residual(hidden: int, dtype: torch.dtype) -> None:
    x, residual = randn(3, hidden, dtype=dtype), randn(3, hidden, dtype=dtype)
    weight = randn(hidden, dtype=dtype)
    assert_close(rmsnorm(x, weight, 1e-5), normed(x, weight, 1e-5), dtype)
    total = x + residual
    out, carried = fused_add_rmsnorm(x, residual, weight, 1e-5)
    assert carried is residual
    assert_close(residual, total.double(), dtype)  # not equal: the interpreter rounds bfloat16 towards zero
    assert_close(out, normed(total, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", sizes([1536], [14336]))
def test_silu_and_mul(width: int, dtype: torch.dtype) -> None:
    x = randn(3, 2 * width, dtype=dtype)
    gate, up = x.double().chunk(2, dim=-1)
    assert_close(silu_and_mul(x), gate * gate.sigmoid() * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (2, 2, 80), (6, 3, 48)])
def test_rotation_turns_slices_of_the_fused_projection_and_stores_them(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    positions, slots = index([0, 7, 3, 50]), index([9, 0, 4, 6])
    qkv = randn(4, heads + 2 * kv_heads, dim, dtype=dtype)
    before = qkv.double()
    angles = torch.outer(torch.arange(64), 10000.0 ** -(torch.arange(0, dim, 2) / dim)).to(DEVICE)
    table = torch.cat([angles.cos(), angles.sin()], dim=1).float()
    pools = [randn(10, kv_heads, dim, dtype=dtype) for _ in "kv"]
    expected_pools = [pool.clone() for pool in pools]
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    rotate_and_store(q, k, v, table, positions, pools[0], pools[1], slots)

    cos, sin = table[positions.long()].double()[:, None, :].chunk(2, dim=-1)
    x, y = before[:, : heads + kv_heads].chunk(2, dim=-1)
    expected = torch.cat([x * cos - y * sin, y * cos + x * sin], dim=-1)
    assert_close(qkv, torch.cat([expected, before[:, heads + kv_heads :]], dim=1), dtype)
    # What is in the pool is what later steps attend to: the very numbers of k and v, and nothing beside them.
    for pool, expected_pool, new in zip(pools, expected_pools, (k, v), strict=True):
        expected_pool[slots.long()] = new
        assert torch.equal(pool, expected_pool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_store_kv_writes_these_slots_and_no_others(dtype: torch.dtype) -> None:
    qkv = randn(5, 7 * 48, dtype=dtype)
    k, v = (qkv[:, start : start + 96].view(5, 2, 48) for start in (144, 240))
    k_buffer, v_buffer = randn(30, 2, 48, dtype=dtype), randn(30, 2, 48, dtype=dtype)
    slots = index([29, 3, 0, 17, 4])
    expected_k, expected_v = k_buffer.clone(), v_buffer.clone()
    expected_k[slots.long()], expected_v[slots.long()] = k, v
    store_kv(k, v, k_buffer, v_buffer, slots)
    assert torch.equal(k_buffer, expected_k) and torch.equal(v_buffer, expected_v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", sizes([50, 9000], [128256]))
def test_selected_logprobs_stop_at_each_request(vocab: int, dtype: torch.dtype) -> None:
    ends = [0, 3, 5]  # of requests of 1, 3 and 2 tokens
    logits = randn(6, vocab, dtype=dtype) * 5
    logits[2, 0] = float("-inf")  # a masked token; its row wants another
    next_ids = torch.randint(1, vocab, (6,), device=DEVICE)
    expected = logits.double().log_softmax(-1).gather(1, next_ids[:, None])[:, 0]
    expected[ends], next_ids[ends] = 0.0, -1
    out = get_selected_logprob(logits, next_ids)
    assert out.dtype == torch.float32
    assert_close(out, expected, torch.float32)
