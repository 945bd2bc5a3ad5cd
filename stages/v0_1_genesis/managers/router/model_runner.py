"""Runs the model on a batch: device, weights, pools, and what the layers must know of the batch.

One ModelRunner per rank, owned by its ModelRpcServer and as long-lived; one InputMetadata per forward pass.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch import Tensor

from ... import models
from ...layers.logits_processor import LogitsProcessorOutput, LogprobPlan, plan_prompt_logprobs
from ...layers.parallel_state import initialize_model_parallel, tensor_model_parallel_min
from ...layers.torch_attention import ExtendPlan, plan_extend
from ...layers.weight_utils import initialize_dummy_weights, safetensors_weights_iterator
from ...memory_pool import ReqToTokenPool, TokenToKVPool, index_dtype
from ...model_config import ModelConfig
from ...server_args import MIN_TOTAL_TOKENS, ServerArgs
from ...support import paged_decode
from ...support.host_memory import available_host_memory
from .infer_batch import Batch, ForwardMode

if TYPE_CHECKING:
    from ...layers.flashinfer_attention import FlashInferAttention

logger = logging.getLogger(__name__)

Attention = Literal["torch", "triton", "flashinfer"]

CPU_POOL_MAX_TOKENS = 32768
CPU_POOL_MEMORY_SHARE = 0.2
"""Default size of the pool on the CPU: this many tokens, or this share of free memory if that is less."""

REQUEST_ROWS = (256, 4096)
"""Bounds of how many requests can have a row of slots at once."""


@dataclass
class InputMetadata:
    """What the layers must know of a batch beyond its tokens. Lists are on the host, tensors on the device.

    ``seq_lens`` and ``prefix_lens`` ``[bs]`` count a request's tokens with the new ones, and those cached;
    ``start_loc`` and ``extend_start_loc`` ``[bs]`` are running sums, from 0, of ``seq_lens`` and of the new
    tokens. ``extend_*`` and ``last_token_index`` ``[bs]`` are set in PREFILL and EXTEND, plans where the
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
    out_cache_cont_start: int | None
    out_cache_cont_end: int | None
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
            out_cache_cont_start=batch.out_cache_cont_start,
            out_cache_cont_end=batch.out_cache_cont_end,
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
        if batch.return_normalized_logprob:
            self.logprob_plan = plan_prompt_logprobs(
                batch.normalized_logprob_start_lens,
                batch.prefix_lens_cpu,
                self.extend_seq_lens_cpu,
                self.seq_lens.device,
            )

    def _init_torch_plan(self, batch: Batch, dtype: torch.dtype) -> None:
        if self.forward_mode is ForwardMode.DECODE:
            self.decode_plan = paged_decode.plan(
                self.req_to_token, self.req_pool_indices, self.seq_lens_cpu, dtype
            )
        elif self.forward_mode is ForwardMode.EXTEND:
            self.extend_plan = plan_extend(
                self.req_to_token, self.req_pool_indices, self.seq_lens_cpu, batch.prefix_lens_cpu, dtype
            )

    def _init_flashinfer_plan(self) -> None:
        """Lay the slots of all sequences end to end, in a few launches however many requests there are."""
        assert self.flashinfer is not None
        total = self.total_num_tokens
        rows = self.req_pool_indices.repeat_interleave(self.seq_lens, output_size=total)
        first = _exclusive_sum(self.seq_lens).repeat_interleave(self.seq_lens, output_size=total)
        kv_indices = self.req_to_token[rows, torch.arange(total, device=rows.device) - first]
        if self.forward_mode is ForwardMode.DECODE:
            self.flashinfer.plan_decode(kv_indices, self.seq_lens_cpu)
        else:
            self.flashinfer.plan_prefill(kv_indices, self.seq_lens_cpu, self.extend_seq_lens_cpu)


def _exclusive_sum(lens: Tensor) -> Tensor:
    """Where each of ``lens`` ``[bs]`` begins when they are laid end to end."""
    return lens.cumsum(0, dtype=lens.dtype) - lens


def choose_device(server_args: ServerArgs, tp_rank: int) -> torch.device:
    """Where rank ``tp_rank`` runs; ``ValueError`` where this machine has too few devices for all ranks."""
    wanted, tp_size = server_args.device, server_args.tp_size
    num_devices = 0 if wanted == "cpu" else torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and num_devices == 0):
        return torch.device("cpu")
    if num_devices == 0:
        raise ValueError(
            "--device cuda: this machine has no CUDA device that torch can use; pass --device cpu."
        )
    if num_devices < tp_size:
        raise ValueError(
            f"--tp-size {tp_size} needs {tp_size} CUDA devices, one for each rank, and there "
            f"{'is' if num_devices == 1 else 'are'} {num_devices}: lower it, or pass --device cpu."
        )
    return torch.device("cuda", tp_rank)


class ModelRunner:
    """One rank's model and pools.

    Args:
        model_config: the model's sizes.
        server_args: device, dtype, load format, pool sizes, attention.
        tp_rank: this rank.
        nccl_port: TCP port where the ranks meet; unused with one rank.

    Raises:
        ValueError: the arguments can't be had with this model or on this machine.
    """

    def __init__(
        self, model_config: ModelConfig, server_args: ServerArgs, tp_rank: int, nccl_port: int
    ) -> None:
        self.model_config = model_config
        self.server_args = server_args
        self.tp_rank = tp_rank
        self.tp_size = server_args.tp_size
        model_config.check_tp_size(self.tp_size)
        self.device = choose_device(server_args, tp_rank)
        self.dtype = self._choose_dtype()
        self.attention = self._choose_attention()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        elif self.tp_size > 1:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.tp_size))
        self._check_sizes()
        initialize_model_parallel(self.tp_size, tp_rank, nccl_port, self.device)
        self.load_model()
        self.init_memory_pool()
        self.flashinfer = self._init_flashinfer() if self.attention == "flashinfer" else None

    # -- choices -----------------------------------------------------------------------------------------

    def _choose_dtype(self) -> torch.dtype:
        name: str = self.server_args.dtype
        if name == "auto":
            name = "float32" if self.device.type == "cpu" else self.model_config.torch_dtype
        return getattr(torch, name)

    def _choose_attention(self) -> Attention:
        if "torch" in self.server_args.model_mode:
            return "torch"
        if "flashinfer" in self.server_args.model_mode:
            if self.device.type != "cuda" or self.dtype not in (torch.float16, torch.bfloat16):
                raise ValueError(
                    "--model-mode flashinfer needs a CUDA device and --dtype bfloat16 or float16, "
                    f"not {self.device.type} and {str(self.dtype).removeprefix('torch.')}."
                )
            return "flashinfer"
        return "triton" if self.device.type == "cuda" else "torch"

    # -- start-up ----------------------------------------------------------------------------------------

    def load_model(self) -> None:
        """Build the model on the device in its dtype, fill it, and let layers rearrange their weights."""
        started = time.perf_counter()
        architecture = next(
            (name for name in self.model_config.architectures if name in models.SUPPORTED_ARCHITECTURES), None
        )
        if architecture is None:
            raise ValueError(f"{self.model_config.path}: no support for {self.model_config.architectures}.")
        module, name = models.SUPPORTED_ARCHITECTURES[architecture]
        model_class = getattr(importlib.import_module(module, models.__name__), name)
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with self.device:
                self.model = model_class(self.model_config)
        finally:
            torch.set_default_dtype(default_dtype)
        if self.server_args.load_format == "dummy":
            initialize_dummy_weights(self.model, self.server_args.random_seed)
        else:
            self.model.load_weights(safetensors_weights_iterator(self.model_config.path))
        for layer in self.model.modules():
            if hasattr(layer, "process_weights_after_loading"):
                layer.process_weights_after_loading()
        logger.info("loaded %s in %.1f s", architecture, time.perf_counter() - started)

    def init_memory_pool(self) -> None:
        """Create both levels of the token pool, of the same size on every rank."""
        config = self.model_config
        wanted = self.server_args.max_total_tokens or self.profile_max_num_token()
        self.max_total_num_token = tensor_model_parallel_min(wanted, self.device)
        fewest, most = REQUEST_ROWS
        rows = min(max(int(self.max_total_num_token / config.context_len * 256), fewest), most)
        self.req_to_token_pool = ReqToTokenPool(rows, config.context_len, self.device)
        self.token_to_kv_pool = TokenToKVPool(
            self.max_total_num_token,
            self.dtype,
            config.get_num_kv_heads(self.tp_size),
            config.head_dim,
            config.num_hidden_layers,
            self.device,
        )

    def _cell_bytes(self) -> int:
        """Bytes of one token's K and V in all layers."""
        config = self.model_config
        num_values = 2 * config.num_hidden_layers * config.get_num_kv_heads(self.tp_size) * config.head_dim
        return num_values * self.dtype.itemsize

    def _check_sizes(self) -> None:
        """Raise ``ValueError`` if a flag asks for more than the memory that is free; an allocator names no flag."""
        if self.device.type == "cpu":
            free = available_host_memory()
        else:
            free, _ = torch.cuda.mem_get_info(self.device)
        row_bytes = REQUEST_ROWS[0] * index_dtype(self.device).itemsize
        for name, unit in (("context_length", row_bytes), ("max_total_tokens", self._cell_bytes())):
            value = getattr(self.server_args, name)
            if value is not None and value * unit > free:
                raise ValueError(
                    f"--{name.replace('_', '-')} {value} needs {value * unit / 2**30:.1f} GiB and "
                    f"{free / 2**30:.1f} GiB are free: lower it."
                )

    def profile_max_num_token(self) -> int:
        """How many tokens the memory that is left can hold.

        On a GPU: what is free now, less the share that ``--mem-fraction-static`` keeps for activations.
        """
        cell_bytes = self._cell_bytes()
        if self.device.type == "cpu":
            share = int(available_host_memory() * CPU_POOL_MEMORY_SHARE) // self.tp_size
            num_tokens = min(CPU_POOL_MAX_TOKENS, share // cell_bytes)
        else:
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self.device)
            num_tokens = int(free - total * (1 - self.server_args.mem_fraction_static)) // cell_bytes
        if num_tokens < MIN_TOTAL_TOKENS:
            raise ValueError(
                "no memory is left for the token pool: free some, raise --mem-fraction-static, "
                "or set --max-total-tokens."
            )
        return num_tokens

    def _init_flashinfer(self) -> FlashInferAttention:
        from ...layers.flashinfer_attention import FlashInferAttention

        config = self.model_config
        return FlashInferAttention(
            config.get_num_attention_heads(self.tp_size),
            config.get_num_kv_heads(self.tp_size),
            config.head_dim,
            self.dtype,
            self.device,
        )

    # -- every step --------------------------------------------------------------------------------------

    def forward(self, batch: Batch, forward_mode: ForwardMode) -> LogitsProcessorOutput:
        """Compute the batch's new tokens: their K and V into the pool, next-token logits as the result."""
        if forward_mode is ForwardMode.DECODE:
            return self.forward_decode(batch)
        if forward_mode is ForwardMode.EXTEND:
            return self.forward_extend(batch)
        return self.forward_prefill(batch)

    def forward_prefill(self, batch: Batch) -> LogitsProcessorOutput:
        """Whole prompts, nothing cached."""
        metadata = InputMetadata.create(self, batch, ForwardMode.PREFILL)
        return self.model(batch.input_ids, batch.positions, metadata)

    def forward_extend(self, batch: Batch) -> LogitsProcessorOutput:
        """What is not cached of each sequence."""
        metadata = InputMetadata.create(self, batch, ForwardMode.EXTEND)
        return self.model(batch.input_ids, batch.positions, metadata)

    def forward_decode(self, batch: Batch) -> LogitsProcessorOutput:
        """One token of each sequence."""
        metadata = InputMetadata.create(self, batch, ForwardMode.DECODE)
        return self.model(batch.input_ids, batch.positions, metadata)
