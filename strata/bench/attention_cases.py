"""The attention workloads of the kernel microbench: data of Llama-3.1-8B's shape, and the paths over it.

A case holds tensors for several layers, together larger than the L2 cache, and gives one call per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from stages.v0_1_genesis.layers.context_flashattention_nopad import context_attention_fwd
from stages.v0_1_genesis.layers.extend_attention import extend_attention_fwd
from stages.v0_1_genesis.layers.flash_attention import Blocks
from stages.v0_1_genesis.layers.token_attention import DecodeBlocks, token_attention_fwd

DEVICE = "cuda"
HEADS, KV_HEADS, HEAD_DIM, DTYPE = 32, 8, 128, torch.bfloat16
ROTATION_BYTES = 2**29
"""K and V that the layers of a decode case hold together, at least: several times an H200's L2 of 60 MB."""

Calls = list[Callable[[], object]]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def arange(stop: int, step: int = 1) -> torch.Tensor:
    return torch.arange(0, stop, step, device=DEVICE, dtype=torch.int32)


class Case(Protocol):
    """Tensors of one workload. ``work``: bytes if it is bound by memory, else floating-point operations."""

    kernel: str
    name: str
    work: float
    o: torch.Tensor

    @property
    def memory_bound(self) -> bool: ...

    def triton(self, blocks: Any = None) -> Calls: ...

    def flashinfer(self) -> Calls: ...

    def error(self) -> float: ...


class DecodeCase:
    """``bs`` requests of ``context`` tokens each, in slots that follow no order."""

    memory_bound = True

    def __init__(self, bs: int, context: int) -> None:
        self.kernel, self.name = "decode", f"bs {bs} x {context}"
        self.bs, self.context, self.tokens = bs, context, bs * context
        # What must be read: K and V once. Queries, answers and slots are a percent of that.
        self.work = float(self.tokens * KV_HEADS * HEAD_DIM * 2 * DTYPE.itemsize)
        layers = min(64, max(2, int(ROTATION_BYTES / self.work)))
        shape = (self.tokens, KV_HEADS, HEAD_DIM)
        self.pools = [(randn(*shape), randn(*shape)) for _ in range(layers)]
        self.slots = torch.randperm(self.tokens, device=DEVICE).to(torch.int32).view(bs, context)
        self.q = randn(bs, HEADS, HEAD_DIM)
        self.o = torch.empty_like(self.q)
        self.rows, self.starts = arange(bs), arange(self.tokens, context)
        self.lens = torch.full_like(self.rows, context)

    def triton(self, blocks: DecodeBlocks | None = None) -> Calls:
        return [partial(self._token_attention, k, v, blocks) for k, v in self.pools]

    def _token_attention(self, k: torch.Tensor, v: torch.Tensor, blocks: DecodeBlocks | None) -> None:
        table = (self.slots, self.rows, self.starts, self.lens)
        token_attention_fwd(self.q, k, v, self.o, *table, self.context, self.tokens, blocks)

    def flashinfer(self) -> Calls:
        """Paged decode, page size 1, tensor cores: planned once, run per layer. Raises ImportError without it."""
        import flashinfer

        workspace = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        indptr = torch.arange(0, self.tokens + 1, self.context, dtype=torch.int32)
        last_page = torch.ones(self.bs, dtype=torch.int32)
        dtypes = {"q_data_type": DTYPE, "kv_data_type": DTYPE}
        wrapper.plan(indptr, self.slots.flatten(), last_page, HEADS, KV_HEADS, HEAD_DIM, 1, **dtypes)
        pages = [(k.unsqueeze(1), v.unsqueeze(1)) for k, v in self.pools]
        return [partial(wrapper.run, self.q, page, out=self.o) for page in pages]

    def error(self) -> float:
        """``‖o - reference‖ / ‖reference‖`` of the last layer's answer for the first request, in float64."""
        k, v = (pool[self.slots[0].long()].double() for pool in self.pools[-1])
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        scores = torch.einsum("hd,nhd->hn", self.q[0].double(), k) * HEAD_DIM**-0.5
        reference = torch.einsum("hn,nhd->hd", scores.softmax(-1), v)
        return ((self.o[0].double() - reference).norm() / reference.norm()).item()


class PrefillCase:
    """New tokens over a cached prefix: ``context_attention_fwd`` if that is empty, else ``extend_…``."""

    memory_bound = False

    def __init__(self, bs: int, prefix: int, new: int) -> None:
        self.kernel, self.name = "extend" if prefix else "context", f"bs {bs} x {prefix}+{new}"
        self.prefix, self.new = prefix, new
        # Two products of two operations per pair of a new token and a key that it sees.
        self.work = 4.0 * bs * HEADS * HEAD_DIM * (new * prefix + new * (new + 1) // 2)
        tokens, total = bs * new, prefix + new
        qkv = randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
        self.q, self.k, self.v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        self.o = torch.empty(tokens, HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
        self.k_buffer, self.v_buffer = (randn(bs * total, KV_HEADS, HEAD_DIM) for _ in "kv")
        self.slots = torch.randperm(bs * total, device=DEVICE).to(torch.int32).view(bs, total)
        new_slots = self.slots[:, prefix:].flatten().long()
        self.k_buffer[new_slots], self.v_buffer[new_slots] = self.k, self.v
        self.rows, self.starts = arange(bs), arange(tokens, new)
        self.lens, self.prefix_lens = (torch.full_like(self.rows, length) for length in (total, prefix))

    def triton(self, blocks: Blocks | None = None) -> Calls:
        new = (self.q, self.k, self.v, self.o)
        if self.prefix == 0:
            return [lambda: context_attention_fwd(*new, self.starts, self.lens, self.new, blocks)]
        pool = (self.k_buffer, self.v_buffer, self.slots, self.rows)
        lens = (self.lens, self.prefix_lens, self.starts)
        return [lambda: extend_attention_fwd(*new, *pool, *lens, self.new, blocks)]

    def flashinfer(self) -> Calls:
        """Paged prefill, page size 1, causal. Raises ImportError without FlashInfer."""
        import flashinfer

        workspace = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        bs, total = self.slots.shape
        q_indptr = torch.arange(0, bs * self.new + 1, self.new, dtype=torch.int32)
        kv_indptr = torch.arange(0, bs * total + 1, total, dtype=torch.int32)
        options: dict[str, Any] = {"causal": True, "q_data_type": DTYPE, "kv_data_type": DTYPE}
        last_page = torch.ones(bs, dtype=torch.int32)
        indices = self.slots.flatten()
        wrapper.plan(q_indptr, kv_indptr, indices, last_page, HEADS, KV_HEADS, HEAD_DIM, 1, **options)
        q, pages = self.q.contiguous(), (self.k_buffer.unsqueeze(1), self.v_buffer.unsqueeze(1))
        return [lambda: wrapper.run(q, pages, out=self.o)]

    def error(self) -> float:
        """``‖o - reference‖ / ‖reference‖`` of the last 64 tokens of the first request, in float64."""
        rows = min(64, self.new)
        k, v = (pool[self.slots[0].long()].double() for pool in (self.k_buffer, self.v_buffer))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        tail = slice(self.new - rows, self.new)
        scores = torch.einsum("mhd,nhd->hmn", self.q[tail].double(), k) * HEAD_DIM**-0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=DEVICE).triu(k.shape[0] - rows + 1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        reference = torch.einsum("hmn,nhd->mhd", weights, v)
        return ((self.o[tail].double() - reference).norm() / reference.norm()).item()
