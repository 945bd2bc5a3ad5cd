"""What the layers must know of a batch beyond its tokens.

Made by the ModelRunner for every forward pass and gone after it; a captured graph keeps one of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from ...layers.logits_processor import LogprobPlan, plan_prompt_logprobs
from ...layers.torch_attention import ExtendPlan, plan_extend
from ...memory_pool import TokenToKVPool
from ...support import paged_decode
from .infer_batch import Batch, ForwardMode

if torch.cuda.is_available():
    from ...layers.kv_indices import gather_kv_indices
if TYPE_CHECKING:
    from ...layers.flashinfer_attention import FlashInferAttention
    from .model_runner import Attention, ModelRunner


@dataclass
class InputMetadata:
    """What the layers must know of a batch beyond its tokens. Lists are on the host, tensors on the device.

    ``seq_lens`` and ``prefix_lens`` ``[bs]`` count a request's tokens with the new ones, and those cached;
    ``start_loc`` and ``extend_start_loc`` ``[bs]`` are running sums, from 0, of ``seq_lens`` and of the new
    tokens. ``extend_*`` and ``last_token_index`` ``[bs]`` are set in EXTEND, plans where the
    attention needs them, ``logprob_plan`` where a prompt is to be scored.
    """

    forward_mode: ForwardMode
    attention: Attention
    batch_size: int
    total_num_tokens: int
    max_seq_len: int
    req_pool_indices: Tensor
    seq_lens: Tensor
    req_to_token: Tensor
    token_to_kv_pool: TokenToKVPool
    out_cache_loc: Tensor
    seq_lens_cpu: list[int]
    flashinfer: FlashInferAttention | None

    start_loc: Tensor = field(init=False)
    prefix_lens: Tensor = field(init=False)
    extend_start_loc: Tensor = field(init=False)
    extend_seq_lens_cpu: list[int] = field(init=False)
    max_extend_len: int = field(init=False)
    extend_plan: ExtendPlan = field(init=False)
    decode_plan: paged_decode.DecodePlan = field(init=False)
    last_token_index: Tensor | None = None
    logprob_plan: LogprobPlan | None = None

    @classmethod
    def create(cls, model_runner: ModelRunner, batch: Batch, forward_mode: ForwardMode) -> Self:
        """Everything of a forward pass that is planned on the host, once for all layers."""
        metadata = cls(
            forward_mode=forward_mode,
            attention=model_runner.attention,
            batch_size=len(batch.seq_lens_cpu),
            total_num_tokens=sum(batch.seq_lens_cpu),
            max_seq_len=max(batch.seq_lens_cpu),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            req_to_token=model_runner.req_to_token_pool.req_to_token,
            token_to_kv_pool=model_runner.token_to_kv_pool,
            out_cache_loc=batch.out_cache_loc,
            seq_lens_cpu=batch.seq_lens_cpu,
            flashinfer=model_runner.flashinfer,
        )
        if forward_mode is not ForwardMode.DECODE:
            metadata._init_extend(batch)
        if metadata.attention == "torch":
            metadata._init_torch_plan(batch, model_runner.dtype)
        elif metadata.attention == "flashinfer":
            metadata._init_flashinfer_plan()
        else:
            metadata.start_loc = _exclusive_sum(metadata.seq_lens)
        return metadata

    def _init_extend(self, batch: Batch) -> None:
        self.prefix_lens = batch.prefix_lens
        self.extend_seq_lens_cpu = [
            seq_len - prefix_len
            for seq_len, prefix_len in zip(batch.seq_lens_cpu, batch.prefix_lens_cpu, strict=True)
        ]
        self.max_extend_len = max(self.extend_seq_lens_cpu)
        extend_seq_lens = batch.seq_lens - batch.prefix_lens
        self.extend_start_loc = _exclusive_sum(extend_seq_lens)
        self.last_token_index = self.extend_start_loc + extend_seq_lens - 1
        if batch.return_logprob:
            self.logprob_plan = plan_prompt_logprobs(
                batch.logprob_start_lens,
                batch.prefix_lens_cpu,
                self.extend_seq_lens_cpu,
                batch.top_logprobs_nums,
                self.seq_lens.device,
            )

    def replan_decode(self, seq_lens_cpu: list[int], dtype: torch.dtype) -> None:
        """Plan for other contents of the same tensors, into the memory that a captured graph knows."""
        self.seq_lens_cpu = seq_lens_cpu
        self.total_num_tokens = sum(seq_lens_cpu)
        self.max_seq_len = max(seq_lens_cpu)
        if self.attention == "flashinfer":
            self._init_flashinfer_plan()
        elif hasattr(self, "decode_plan"):
            self.decode_plan.replace(self._plan_decode(dtype))
        else:
            self.decode_plan = self._plan_decode(dtype)

    def _plan_decode(self, dtype: torch.dtype) -> paged_decode.DecodePlan:
        return paged_decode.plan(self.req_to_token, self.req_pool_indices, self.seq_lens_cpu, dtype)

    def _init_torch_plan(self, batch: Batch, dtype: torch.dtype) -> None:
        if self.forward_mode is ForwardMode.DECODE:
            self.decode_plan = self._plan_decode(dtype)
        else:
            self.extend_plan = plan_extend(
                self.req_to_token, self.req_pool_indices, self.seq_lens_cpu, batch.prefix_lens_cpu, dtype
            )

    def _init_flashinfer_plan(self) -> None:
        assert self.flashinfer is not None
        kv_indices = gather_kv_indices(
            self.req_to_token, self.req_pool_indices, self.seq_lens, self.total_num_tokens, self.max_seq_len
        )
        if self.forward_mode is ForwardMode.DECODE:
            self.flashinfer.plan_decode(kv_indices, self.seq_lens_cpu)
        else:
            self.flashinfer.plan_prefill(kv_indices, self.seq_lens_cpu, self.extend_seq_lens_cpu)


def _exclusive_sum(lens: Tensor) -> Tensor:
    """Where each of ``lens`` ``[bs]`` begins when they are laid end to end."""
    return lens.cumsum(0, dtype=lens.dtype) - lens
