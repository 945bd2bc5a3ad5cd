"""Rotary position embedding: angles computed once per model, gathered once per step, applied in every layer.

`RotaryEmbedding` is part of the model of each rank; the rotation that its forward returns lives for a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if torch.cuda.is_available():
    from .fused_rotary import rotate_and_store


@dataclass
class Rotation:
    """How far each of a step's tokens turns: ``cos`` and ``sin`` ``[tokens, 1, head_dim]``.

    (a, b), the halves of a head, become (a cos - b sin, b cos + a sin). Rolling a head by half its size swaps
    a and b, so both halves turn at once with the sign in ``sin``, whose first half is negated.
    """

    cos: Tensor
    sin: Tensor

    def split(self, qkv: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """``qkv`` ``[tokens, num_heads + 2 * num_kv_heads, head_dim]`` -> its queries, keys and values, the first
        two rotated."""
        qk, v = qkv.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), dim=1)
        rotated = torch.addcmul(qk * self.cos, qk.roll(qk.shape[-1] // 2, dims=-1), self.sin)
        return rotated[:, :num_heads], rotated[:, num_heads:], v


@dataclass
class FusedRotation:
    """The same in one launch with the storing of K and V. It looks ``positions`` ``[tokens]`` up by itself."""

    cos_sin_cache: Tensor
    positions: Tensor

    def split(self, qkv: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """As `Rotation.split`, but nothing is rotated before `store`."""
        q, k, v = qkv.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
        return q, k, v

    def store(
        self, q: Tensor, k: Tensor, v: Tensor, k_buffer: Tensor, v_buffer: Tensor, out_cache_loc: Tensor
    ) -> None:
        """Rotate q and k in place, and write k and v to their slots."""
        rotate_and_store(q, k, v, self.cos_sin_cache, self.positions, k_buffer, v_buffer, out_cache_loc)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of every position and frequency, as one table ``[max_position, head_dim]``.

    In torch's default dtype, which is the model's while it is built; angles are computed in float32.

    Args:
        head_dim: size of a head; dimension ``i`` turns together with ``i + head_dim / 2``.
        max_position: positions go from 0 to one less.
        base: RoPE's theta.
        scaling: ``rope_scaling`` of the model's config, of type linear or llama3; or None.
    """

    cos_sin_cache: Tensor

    def __init__(self, head_dim: int, max_position: int, base: float, scaling: dict[str, Any] | None) -> None:
        super().__init__()
        inv_freq = scale_frequencies(inverse_frequencies(head_dim, base), scaling)
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inv_freq)
        cache = torch.cat((angles.cos(), angles.sin()), dim=-1).to(torch.get_default_dtype())
        self.register_buffer("cos_sin_cache", cache, persistent=False)

    def forward(self, positions: Tensor) -> Rotation | FusedRotation:
        """The rotation of ``positions`` ``[tokens]``, for all layers of a step."""
        if positions.is_cuda:
            return FusedRotation(self.cos_sin_cache, positions)
        cos, sin = F.embedding(positions, self.cos_sin_cache).unsqueeze(1).chunk(2, dim=-1)
        return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def inverse_frequencies(head_dim: int, base: float) -> Tensor:
    """Radians per position of each pair of dimensions: float32 ``[head_dim / 2]``."""
    return 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def scale_frequencies(inv_freq: Tensor, scaling: dict[str, Any] | None) -> Tensor:
    """Stretch positions so that a model serves longer contexts than it was first trained on."""
    if scaling is None:
        return inv_freq
    if scaling["rope_type"] == "linear":
        return inv_freq / scaling["factor"]
    return _scale_llama3(inv_freq, scaling)


def _scale_llama3(inv_freq: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1: slow frequencies are divided by ``factor``, fast ones kept, those between interpolated.

    How often a frequency turns within the original context decides: fewer times than ``low_freq_factor`` is
    slow, more than ``high_freq_factor`` is fast.
    """
    turns = scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - kept) * inv_freq / scaling["factor"] + kept * inv_freq
