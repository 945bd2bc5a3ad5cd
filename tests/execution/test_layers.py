"""Layers against the formulas they stand for, and transformers' where it has one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from stages.v0_1_genesis.layers.activation import SiluAndMul
from stages.v0_1_genesis.layers.layernorm import RMSNorm
from stages.v0_1_genesis.layers.linear import QKVParallelLinear
from stages.v0_1_genesis.layers.rotary_embedding import RotaryEmbedding

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_adds_the_residual_first(dtype: torch.dtype) -> None:
    norm = RMSNorm(48, eps=1e-5).to(dtype)
    norm.eps_row = norm.eps_row.float()
    norm.weight.data.uniform_(0.5, 1.5)
    x, residual = torch.randn(2, 5, 48).to(dtype)
    normed, summed = norm(x, residual)
    torch.testing.assert_close(summed, x + residual)
    expected = F.rms_norm(summed.float(), (48,), norm.weight.float(), 1e-5).to(dtype)
    torch.testing.assert_close(normed, expected, atol=2e-2 if dtype == torch.bfloat16 else 1e-6, rtol=1e-2)
    alone, kept = norm(x)
    torch.testing.assert_close(kept, x)
    assert alone.dtype == dtype


def test_silu_and_mul_gates_the_second_half() -> None:
    gate, up = torch.randn(2, 7, 10)
    torch.testing.assert_close(SiluAndMul()(torch.cat((gate, up), -1)), F.silu(gate) * up)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
def test_rotation_is_transformers(scaling: dict[str, Any] | None) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(head_dim=32, hidden_size=128, num_attention_heads=4, max_position_embeddings=1024)
    config.rope_parameters = {"rope_theta": 10000.0, **(scaling or {"rope_type": "default"})}
    positions, qkv = torch.tensor([0, 1, 127, 128, 1000]), torch.randn(5, 8, 32)
    qk = qkv[:, :6]
    rotation = RotaryEmbedding(32, 1024, 10000.0, scaling)(positions)
    q, k, v = rotation.split(qkv, num_heads=4, num_kv_heads=2)
    assert torch.equal(v, qkv[:, 6:])
    cos, sin = LlamaRotaryEmbedding(config)(qk, positions.unsqueeze(0))
    heads_first = qk.transpose(0, 1).unsqueeze(0)
    expected, _ = apply_rotary_pos_emb(heads_first, heads_first, cos, sin)
    torch.testing.assert_close(torch.cat((q, k), 1), expected[0].transpose(0, 1), atol=1e-4, rtol=1e-4)


def test_qkv_loads_three_tensors_into_one() -> None:
    layer = QKVParallelLinear(8, head_dim=4, total_num_heads=6, total_num_kv_heads=2)
    q, k, v = torch.randn(24, 8), torch.randn(8, 8), torch.randn(8, 8)
    for shard_id, weight in enumerate((q, k, v)):
        layer.load_weight(layer.weight, shard_id, weight)
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer(x), torch.cat([F.linear(x, w) for w in (q, k, v)], -1))
