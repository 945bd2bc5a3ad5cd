"""Runs the model on a batch: device, weights, pools.

One ModelRunner per rank, owned by its ModelTpServer and as long-lived.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Literal

import torch

from ... import models
from ...layers.logits_processor import LogitsProcessorOutput
from ...layers.parallel_state import initialize_model_parallel, tensor_model_parallel_min
from ...layers.weight_utils import initialize_dummy_weights, safetensors_weights_iterator
from ...memory_pool import ReqToTokenPool, TokenToKVPool, index_dtype
from ...model_config import ModelConfig
from ...network import LOOPBACK
from ...server_args import MIN_TOTAL_TOKENS, ServerArgs
from ...support.host_memory import available_host_memory
from .cuda_graph_runner import CudaGraphRunner
from .infer_batch import Batch, ForwardMode
from .input_metadata import InputMetadata

if TYPE_CHECKING:
    from ...layers.flashinfer_attention import FlashInferAttention

logger = logging.getLogger(__name__)

Attention = Literal["torch", "triton", "flashinfer"]

CPU_POOL_MAX_TOKENS = 32768
CPU_POOL_MEMORY_SHARE = 0.2
"""Default size of the pool on the CPU: this many tokens, or this share of free memory if that is less."""

MIN_REQUEST_ROWS = 2048
"""So many requests at least can have a row of slots at once."""


def choose_device(server_args: ServerArgs, tp_rank: int, dp_rank: int = 0) -> torch.device:
    """Where a rank of a replica runs; ``ValueError`` where this machine has too few devices for all of them."""
    wanted, num_needed = server_args.device, server_args.ranks_per_node
    num_devices = 0 if wanted == "cpu" else torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and num_devices == 0):
        return torch.device("cpu")
    if num_devices == 0:
        raise ValueError(
            "--device cuda: this machine has no CUDA device that torch can use; pass --device cpu."
        )
    if num_devices < num_needed:
        sizes = {"tp": server_args.tp_size, "dp": server_args.dp_size}
        flags = " ".join(f"--{name}-size {size}" for name, size in sizes.items() if size > 1)
        raise ValueError(
            f"{flags} needs {num_needed} CUDA devices, one for each rank, and there "
            f"{'is' if num_devices == 1 else 'are'} {num_devices}: lower it, or pass --device cpu."
        )
    num_ranks = len(server_args.node_ranks)
    return torch.device("cuda", dp_rank * num_ranks + tp_rank % num_ranks)


class ModelRunner:
    """One rank's model and pools.

    Args:
        model_config: the model's sizes.
        server_args: device, dtype, load format, pool sizes, attention.
        tp_rank: this rank.
        nccl_port: TCP port of this machine where the ranks meet; unused with one rank or several nodes.
        dp_rank: this replica.

    Raises:
        ValueError: the arguments can't be had with this model or on this machine.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        server_args: ServerArgs,
        tp_rank: int,
        nccl_port: int,
        dp_rank: int = 0,
    ) -> None:
        self.model_config = model_config
        self.server_args = server_args
        self.tp_rank = tp_rank
        self.tp_size = server_args.tp_size
        model_config.check_tp_size(self.tp_size)
        self.device = choose_device(server_args, tp_rank, dp_rank)
        self.dtype = self._choose_dtype()
        self.attention = self._choose_attention()
        wants_graphs = self._wants_graphs()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        elif server_args.ranks_per_node > 1:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // server_args.ranks_per_node))
        address = server_args.node_address or (LOOPBACK, nccl_port)
        self._check_sizes()
        initialize_model_parallel(self.tp_size, tp_rank, address, self.device)
        self.load_model()
        self.init_memory_pool()
        self.flashinfer = self._init_flashinfer() if self.attention == "flashinfer" else None
        self.cuda_graph_runner = self._init_cuda_graphs() if wants_graphs else None
        self.num_graph_replays = 0

    # -- choices -----------------------------------------------------------------------------------------

    def _choose_dtype(self) -> torch.dtype:
        name: str = self.server_args.dtype
        if name == "auto":
            name = "float32" if self.device.type == "cpu" else self.model_config.torch_dtype
        return getattr(torch, name)

    def _choose_attention(self) -> Attention:
        if self.device.type == "cpu" or self.server_args.enable_torch_attention:
            return "torch"
        if self.server_args.disable_flashinfer or self.dtype == torch.float32:
            return "triton"
        return "flashinfer"

    def _wants_graphs(self) -> bool:
        """Whether decoding replays graphs; ``ValueError`` if it does not, and they were to be compiled."""
        if self.device.type == "cpu":
            wanted = self.server_args.enable_cpu_graph
        else:
            wanted = self.attention == "flashinfer" and not self.server_args.disable_cuda_graph
        if self.server_args.enable_torch_compile and not (wanted and self.device.type == "cuda"):
            raise ValueError(
                "--enable-torch-compile compiles what CUDA graphs capture: it needs a GPU, float16 or bfloat16, "
                "and neither --disable-cuda-graph nor --disable-flashinfer."
            )
        return wanted

    # -- start-up ----------------------------------------------------------------------------------------

    def load_model(self) -> None:
        """Build the model on the device in its dtype, fill it, and let layers rearrange their weights."""
        started = time.perf_counter()
        architecture = next(
            (name for name in self.model_config.architectures if name in models.SUPPORTED_ARCHITECTURES), None
        )
        if architecture is None:
            raise ValueError(f"{self.model_config.path}: no support for {self.model_config.architectures}.")
        model_class = models.load_model_class(architecture)
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
        rows = max(int(self.max_total_num_token / config.context_len * 512), MIN_REQUEST_ROWS)
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
        row_bytes = MIN_REQUEST_ROWS * index_dtype(self.device).itemsize
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
            share = int(available_host_memory() * CPU_POOL_MEMORY_SHARE) // self.server_args.ranks_per_node
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

    def _init_cuda_graphs(self) -> CudaGraphRunner:
        max_running = self.server_args.max_running_requests or self.req_to_token_pool.size
        return CudaGraphRunner(self, max_running)

    # -- every step --------------------------------------------------------------------------------------

    def forward(self, batch: Batch, forward_mode: ForwardMode) -> LogitsProcessorOutput:
        """Compute the batch's new tokens: their K and V into the pool, next-token logits as the result."""
        if forward_mode is ForwardMode.DECODE:
            return self.forward_decode(batch)
        return self.forward_extend(batch)

    def forward_extend(self, batch: Batch) -> LogitsProcessorOutput:
        """What is not cached of each sequence."""
        metadata = InputMetadata.create(self, batch, ForwardMode.EXTEND)
        return self.model(batch.input_ids, batch.positions, metadata)

    def forward_decode(self, batch: Batch) -> LogitsProcessorOutput:
        """One token of each sequence: by replay where a graph holds the batch."""
        if self.cuda_graph_runner is not None and self.cuda_graph_runner.can_run(len(batch)):
            self.num_graph_replays += 1
            return self.cuda_graph_runner.replay(batch)
        metadata = InputMetadata.create(self, batch, ForwardMode.DECODE)
        return self.model(batch.input_ids, batch.positions, metadata)
