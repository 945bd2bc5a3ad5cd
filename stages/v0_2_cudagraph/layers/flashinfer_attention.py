"""FlashInfer's paged attention over the token pool: a page is one slot.

One `FlashInferAttention` per rank, made by ModelRunner where it chooses FlashInfer, and one more for
every captured batch size; its plan is replaced every step. FlashInfer wants fp16 or bf16 and a CUDA device.

How January 2024's calls map to today's (0.6):

====================================  =====================================================================
January 2024 (0.0.x)                  today
====================================  =====================================================================
a new wrapper for every batch         two wrappers, made once: JIT modules and the workspace are kept
``begin_forward(qo_indptr,            ``plan(qo_indptr, kv_indptr, kv_indices, last_page_len,
kv_indptr, kv_indices,                num_qo_heads, num_kv_heads, head_dim_qk, page_size=1, causal=True,
last_page_len, num_qo_heads,          q_data_type=…, kv_data_type=…)``: dtypes choose the kernel here; the
num_kv_heads)``                       causal mask moved here from ``forward``
decode's ``begin_forward(…,           decode's ``plan(…, head_dim, page_size=1, q_data_type=…,
"NONE", data_type)``                  kv_data_type=…)``
``forward(q, kv_data[layer],          ``run(q, (k_cache, v_cache))``; K and V are two tensors
causal=True,                          ``[pages, page_size, kv_heads, head_dim]`` instead of one with both;
allow_fp16_qk_reduction=True)``       scores are always summed in float32
``end_forward()``                     nothing: the next ``plan`` overwrites
indptr arrays on the GPU              on the host, where planning happens: on the GPU they would be read back
(July 2024) decode's wrapper with     the same, with ``use_tensor_cores=True``; ``plan`` copies the host's indptr
``use_cuda_graph``, fixed buffers     into the fixed buffer
====================================  =====================================================================
"""

from __future__ import annotations

from copy import copy
from itertools import accumulate

import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

WORKSPACE_BYTES = 256 * 1024 * 1024
"""For partial results of split sequences; FlashInfer recommends at least half of it."""


class FlashInferAttention:
    """Wrappers, workspace, and the plan of the current step.

    Args:
        num_qo_heads, num_kv_heads, head_dim: of this rank's part of the model.
        dtype: of queries and of the pool.
    """

    def __init__(
        self, num_qo_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_qo_heads = num_qo_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = device
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.prefill_wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        # With tensor cores decode runs prefill's kernel: faster, and any number of heads may share a KV head.
        self.decode_wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        self._planned: BatchPrefillWithPagedKVCacheWrapper | BatchDecodeWithPagedKVCacheWrapper

    def init_graph_buffers(self, max_size: int, max_seq_len: int) -> None:
        """Make what the decode wrappers of captured graphs share: a workspace and buffers at fixed addresses.

        The workspace is apart from the eager one, whose contents a prefill may change. Only one graph runs at a
        time. Requests may share slots, so there can be more indices than the pool has slots.
        """
        self._graph_workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._kv_indptr = torch.zeros(max_size + 1, dtype=torch.int32, device=self.device)
        self._kv_indices = torch.zeros(max_size * max_seq_len, dtype=torch.int32, device=self.device)
        self._last_page_len = torch.ones(max_size, dtype=torch.int32, device=self.device)

    def for_graph(self, batch_size: int) -> FlashInferAttention:
        """One to capture decoding of ``batch_size`` requests with: its plans go to the same memory each time."""
        attention = copy(self)
        attention.decode_wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self._graph_workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=self._kv_indptr[: batch_size + 1],
            paged_kv_indices_buffer=self._kv_indices,
            paged_kv_last_page_len_buffer=self._last_page_len[:batch_size],
        )
        return attention

    def plan_prefill(self, kv_indices: Tensor, seq_lens: list[int], extend_lens: list[int]) -> None:
        """Plan causal attention of each request's last ``extend_lens`` tokens over all its ``seq_lens``.

        ``kv_indices`` int32 ``[sum(seq_lens)]``, on the device: the slots of all sequences end to end.
        """
        self._planned = self.prefill_wrapper
        self.prefill_wrapper.plan(
            _indptr(extend_lens),
            _indptr(seq_lens),
            kv_indices,
            _last_page_len(seq_lens),
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim,
            page_size=1,
            causal=True,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )

    def plan_decode(self, kv_indices: Tensor, seq_lens: list[int]) -> None:
        """Plan attention of one token per request over all its ``seq_lens``; arguments as above."""
        self._planned = self.decode_wrapper
        self.decode_wrapper.plan(
            _indptr(seq_lens),
            kv_indices,
            _last_page_len(seq_lens),
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim,
            page_size=1,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, q: Tensor, k_buffer: Tensor, v_buffer: Tensor) -> Tensor:
        """One layer: ``q`` ``[tokens, heads, head_dim]``, pools ``[slots, kv_heads, head_dim]``; like q."""
        return self._planned.run(q, (k_buffer.unsqueeze(1), v_buffer.unsqueeze(1)))


def _indptr(lens: list[int]) -> Tensor:
    """Where each request begins, and the end: int32 ``[bs + 1]`` on the host."""
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32)


def _last_page_len(lens: list[int]) -> Tensor:
    """Pages of one token are always full: int32 ``[bs]`` on the host."""
    return torch.ones(len(lens), dtype=torch.int32)
