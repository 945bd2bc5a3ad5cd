"""Attention in float64 torch, and a batch whose cached tokens lie scattered in a pool of NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .setting import DEVICE, INDEX_DTYPE, index, randn, running_sum


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last ``len(q)`` positions, float64: q ``[m, heads, dim]``, k, v ``[n, kv, dim]``."""
    m, n, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    keys = k.double().repeat_interleave(group, dim=1)
    values = v.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("mhd,nhd->hmn", q.double(), keys) * q.shape[2] ** -0.5
    hidden = torch.ones(m, n, dtype=torch.bool, device=q.device).triu(n - m + 1)
    return torch.einsum("hmn,nhd->mhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


@dataclass
class PagedBatch:
    """Requests whose tokens are in the pool; every slot that none of them owns holds NaN (INV-NAN)."""

    seq_lens: list[int]
    k: list[torch.Tensor]  # per request [seq_len, kv_heads, head_dim]
    v: list[torch.Tensor]
    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor


def paged_batch(
    seq_lens: list[int],
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    index_dtype: torch.dtype = INDEX_DTYPE,
) -> PagedBatch:
    """Random K and V in shuffled slots; rows of a strided ``req_to_token`` in reverse, its tails on NaN slots."""
    slots = sum(seq_lens) + 9
    shuffled = torch.randperm(slots, device=DEVICE)
    nan_slot = int(shuffled[-1])
    k_buffer = torch.full((slots, kv_heads, head_dim), float("nan"), device=DEVICE, dtype=dtype)
    v_buffer = torch.full_like(k_buffer, float("nan"))
    wide = torch.full((len(seq_lens) + 2, max(seq_lens) + 70), nan_slot, device=DEVICE, dtype=index_dtype)
    req_to_token = wide[:, 3:]
    rows = list(range(len(seq_lens) + 1, 1, -1))
    k, v = [], []
    for row, start, length in zip(rows, running_sum(seq_lens), seq_lens, strict=True):
        owned = shuffled[start : start + length]
        req_to_token[row, :length] = owned.to(index_dtype)
        k.append(randn(length, kv_heads, head_dim, dtype=dtype))
        v.append(randn(length, kv_heads, head_dim, dtype=dtype))
        k_buffer[owned], v_buffer[owned] = k[-1], v[-1]
    return PagedBatch(seq_lens, k, v, k_buffer, v_buffer, req_to_token, index(rows, index_dtype))
