"""Decoding by replay: one graph per batch size, captured at start, so that a step costs one launch.

Owned by the ModelRunner and alive as long as it. On a GPU the graphs are CUDA graphs over FlashInfer; on the
CPU they are tapes (`support/graph_tape.py`). A graph freezes shapes and addresses, and hence:

- its inputs are static buffers, filled anew before each replay;
- a batch runs in the smallest graph that holds it, and the surplus rows are padding (INV-PAD);
- attention is planned outside of the graph, into memory at fixed addresses;
- its output is overwritten by the next replay of any size: all graphs share one memory pool.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ...layers.logits_processor import LogitsProcessorOutput
from ...support.graph_tape import Graph, make_graph, make_pool
from .infer_batch import Batch, ForwardMode
from .input_metadata import InputMetadata
from .static_inputs import StaticInputs

if TYPE_CHECKING:
    from .model_runner import ModelRunner

logger = logging.getLogger(__name__)

CAPTURE_SIZES = (1, 2, 4, *range(8, 129, 8))
COMPILED_SIZES = (1, 2, 4, 8, 16, 24, 32)
"""Sizes that --enable-torch-compile compiles: small batches gain from fused kernels, and compiling takes long."""
NUM_WARM_UPS = 2
"""Runs before a capture: libraries allocate and choose kernels on first use, which no graph may contain."""
MAX_CHECKED_LEN = 8
"""Longest sequence of the made-up batches that a capture is checked with."""


class CudaGraphRunner:
    """Captures the decode step for every size, and replays it for batches that fit.

    Args:
        model_runner: loaded, with its pools.
        max_batch_size: largest batch that will ever decode: larger sizes than it needs are not captured.
    """

    def __init__(self, model_runner: ModelRunner, max_batch_size: int) -> None:
        self.model_runner = model_runner
        limit = min(model_runner.req_to_token_pool.size, model_runner.token_to_kv_pool.size)
        enough = bisect.bisect_left(CAPTURE_SIZES, max_batch_size) + 1
        self.sizes = [size for size in CAPTURE_SIZES[:enough] if size <= limit]
        self.max_size = self.sizes[-1]
        index_dtype = model_runner.token_to_kv_pool.index_dtype
        self.inputs = StaticInputs(self.max_size, index_dtype, model_runner.device)
        if model_runner.flashinfer is not None:
            model_runner.flashinfer.init_graph_buffers(self.max_size, model_runner.model_config.context_len)
        self._random = torch.Generator().manual_seed(model_runner.server_args.random_seed)
        self.metadata: dict[int, InputMetadata] = {}
        self.graphs: dict[int, Graph] = {}
        self.outputs: dict[int, LogitsProcessorOutput] = {}
        self.capture()

    def can_run(self, batch_size: int) -> bool:
        return batch_size <= self.max_size

    def padded_size(self, batch_size: int) -> int:
        """The smallest captured size that holds ``batch_size`` requests."""
        return self.sizes[bisect.bisect_left(self.sizes, batch_size)]

    # -- capture -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, in one memory pool, since only one graph runs at a time."""
        started = time.perf_counter()
        pool = make_pool(self.model_runner.device)
        for size in self.sizes:
            self._capture_and_report(size, pool)
        self._clear_made_up()
        logger.info("captured %d graphs in %.1f s", len(self.sizes), time.perf_counter() - started)

    def _capture_and_report(self, size: int, pool: object) -> None:
        started, free = time.perf_counter(), self._free_memory()
        self.capture_one_batch_size(size, pool)
        logger.info(
            "captured batch size %d (%d of %d) in %.2f s%s",
            size,
            len(self.graphs),
            len(self.sizes),
            time.perf_counter() - started,
            f", {(free - self._free_memory()) / 2**20:.1f} MiB" if free else "",
        )

    def capture_one_batch_size(self, size: int, pool: object) -> None:
        """Warm up, then capture; the graph checks a replay on other inputs against a plain run."""
        metadata = self.metadata[size] = self._static_metadata(size)
        inputs = self.inputs
        self._make_up(size)

        model = self._model(size)

        def run() -> LogitsProcessorOutput:
            return model(inputs.input_ids[:size], inputs.positions[:size], metadata)

        for _ in range(NUM_WARM_UPS):
            run()
        self._synchronize()
        graph = make_graph(self.model_runner.device, pool)
        self.outputs[size] = graph.capture(run, vary=lambda: self._make_up(size))
        self.graphs[size] = graph

    def _model(self, size: int) -> Callable[..., LogitsProcessorOutput]:
        """The model, compiled for ``size`` if wanted; its first warm-up run then takes the time."""
        if not self.model_runner.server_args.enable_torch_compile or size not in COMPILED_SIZES:
            return self.model_runner.model
        # Layers differ in constants, such as their number: without room for all, the last ones would run eagerly.
        torch._dynamo.config.recompile_limit = 1024
        torch._dynamo.config.accumulated_recompile_limit = 4096
        return torch.compile(self.model_runner.model, mode="max-autotune-no-cudagraphs", dynamic=False)

    def _static_metadata(self, size: int) -> InputMetadata:
        """What the layers inside the graph see for ever: views of the static buffers."""
        runner, inputs = self.model_runner, self.inputs
        return InputMetadata(
            forward_mode=ForwardMode.DECODE,
            attention=runner.attention,
            batch_size=size,
            total_num_tokens=size,
            max_seq_len=1,
            req_pool_indices=inputs.req_pool_indices[:size],
            seq_lens=inputs.seq_lens[:size],
            req_to_token=runner.req_to_token_pool.req_to_token,
            token_to_kv_pool=runner.token_to_kv_pool,
            out_cache_loc=inputs.out_cache_loc[:size],
            seq_lens_cpu=[1] * size,
            flashinfer=None if runner.flashinfer is None else runner.flashinfer.for_graph(size),
        )

    def _make_up(self, size: int) -> None:
        """Another valid batch of ``size`` requests, which all have lengths, slots and rows of their own.

        They may share slots that they only read; each writes to one of its own. Every rank makes up the same, as
        they would share it: of tokens that differ between ranks, no rank might have the embeddings. Every token is
        another one than before, so that the outputs are other ones too.
        """
        inputs, runner = self.inputs, self.model_runner
        table, pool_size = runner.req_to_token_pool.req_to_token, runner.token_to_kv_pool.size
        longest = min(MAX_CHECKED_LEN, runner.model_config.context_len)
        slots = torch.arange(1, size + 1, dtype=table.dtype, device=table.device)
        vocab_size, random = runner.model_config.vocab_size, self._random
        read = torch.randint(1, pool_size + 1, (size, longest), generator=random)
        table[:size, :longest] = read.to(table.device)
        seq_lens = torch.randint(1, longest + 1, (size,), generator=random).tolist()
        steps = torch.randint(1, vocab_size, (size,), generator=random).to(table.device)
        inputs.input_ids[:size] = (inputs.input_ids[:size] + steps) % vocab_size
        inputs.seq_lens[:size] = torch.tensor(seq_lens)
        inputs.positions[:size] = inputs.seq_lens[:size] - 1
        inputs.req_pool_indices[:size] = slots - 1
        inputs.out_cache_loc[:size] = slots
        table[inputs.req_pool_indices[:size], inputs.positions[:size]] = slots
        self.metadata[size].replan_decode(seq_lens, runner.dtype)

    def _clear_made_up(self) -> None:
        """Leave the pools as they were: all zeros (INV-NAN)."""
        runner = self.model_runner
        runner.req_to_token_pool.req_to_token[: self.max_size] = 0
        for buffer in (*runner.token_to_kv_pool.k_buffer, *runner.token_to_kv_pool.v_buffer):
            buffer[: self.max_size + 1] = 0

    def _synchronize(self) -> None:
        if self.model_runner.device.type == "cuda":
            torch.cuda.synchronize()

    def _free_memory(self) -> int:
        """Bytes of the GPU's memory that are free; 0 on the CPU, where tapes take next to nothing."""
        device = self.model_runner.device
        return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0

    # -- replay ------------------------------------------------------------------------------------------

    def replay(self, batch: Batch) -> LogitsProcessorOutput:
        """Decode ``batch`` in the smallest graph that holds it.

        The logits ``[bs, vocab]`` are a view of the graph's own: good until the next replay.
        """
        batch_size = len(batch)
        size = self.padded_size(batch_size)
        self.inputs.fill(batch, size)
        padding = [1] * (size - batch_size)
        self.metadata[size].replan_decode(batch.seq_lens_cpu + padding, self.model_runner.dtype)
        self.graphs[size].replay()
        return LogitsProcessorOutput(self.outputs[size].next_token_logits[:batch_size])
