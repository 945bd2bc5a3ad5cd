"""Scheduling and execution in one object: each step prefills new requests or decodes the running ones.

A ModelTpServer lives as long as its rank. Rank 0's sits inside the controller process and is called directly;
the others follow it in processes of their own (`tp_ranks.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...global_config import global_config
from ...model_config import ModelConfig
from ...server_args import ServerArgs
from ...support.engine_stats import EngineStats
from ...support.staging import StagingBuffer
from ...support.step_timer import StepTimer
from ..io_struct import (
    AbortReq,
    ControlOut,
    DetokenizerInput,
    EngineInput,
    FlushCacheReq,
    GetInternalStateReq,
    TokenizedGenerateReqInput,
)
from .infer_batch import Batch, FinishReason, ForwardMode, Req
from .logprobs import add_decode_logprobs, add_prefill_logprobs, model_logits
from .model_runner import ModelRunner
from .output_streamer import OutputStreamer
from .radix_cache import RadixCache
from .request_intake import RequestIntake
from .retokenize import Retokenizer
from .schedule_heuristic import ScheduleHeuristic
from .stats_log import StatsLog

logger = logging.getLogger(__name__)


class ModelTpServer:
    """The engine of one rank: queue, running batch, pools, tree, model.

    Every rank runs the same code on the same messages, so their states stay equal without being compared.

    Args:
        server_args: checked arguments.
        tp_rank: this rank, in [0, server_args.tp_size).
        nccl_port: TCP port where ranks meet; unused with one rank.
        dp_rank: this replica, in [0, server_args.dp_size).
    """

    def __init__(
        self, server_args: ServerArgs, tp_rank: int = 0, nccl_port: int = 0, dp_rank: int = 0
    ) -> None:
        self.server_args = server_args
        self.tp_rank = tp_rank
        self.model_config = ModelConfig(server_args.model_path, server_args.context_length)
        self.model_runner = ModelRunner(self.model_config, server_args, tp_rank, nccl_port, dp_rank)
        self.req_to_token_pool = self.model_runner.req_to_token_pool
        self.token_to_kv_pool = self.model_runner.token_to_kv_pool
        self.tree_cache = RadixCache(
            self.req_to_token_pool, self.token_to_kv_pool, disable=server_args.disable_radix_cache
        )
        self.staging = StagingBuffer(self.model_runner.device, self.token_to_kv_pool.index_dtype)
        self.scheduler = ScheduleHeuristic(
            server_args.schedule_heuristic, self.tree_cache, seed=server_args.random_seed
        )

        self.max_total_num_token = self.model_runner.max_total_num_token
        self.max_num_running_seq = server_args.max_running_requests or max(self.max_total_num_token // 2, 1)
        self.max_prefill_tokens = server_args.max_prefill_tokens or global_config.max_prefill_tokens

        self.forward_queue: list[Req] = []
        self.running_batch = self._new_batch([])
        self.num_continue_decode_steps = global_config.num_continue_decode_steps
        self.retract_every = server_args.debug_retract_every
        """Force a retraction every so many decode steps; 0 for never. For tests and traces."""
        floor = global_config.base_min_new_token_ratio * server_args.schedule_conservativeness
        self.min_new_token_ratio = min(floor, 1.0)
        self.new_token_ratio = self.min_new_token_ratio
        self.intake = RequestIntake(
            server_args, self.model_config, self.max_total_num_token, self.model_runner.device
        )
        self.retokenizer = Retokenizer(self.intake.tokenizer, self.model_config.vocab_size)
        self.num_jumps = self.num_jumped_tokens = 0
        self.output = OutputStreamer(server_args.stream_interval)
        self.stats = EngineStats()
        self.step_timer = StepTimer()
        log_enabled = tp_rank == 0 and not server_args.disable_log_stats
        self.stats_log = StatsLog(log_enabled, self.stats, self.token_to_kv_pool)

    # -- one step ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def exposed_step(self, recv_reqs: Sequence[EngineInput]) -> list[DetokenizerInput]:
        """Take in ``recv_reqs``, do one prefill or one decode run, and return what is to be sent on."""
        for message in recv_reqs:
            self._dispatch(message)
        self.forward_step()
        return self.output.take()

    def forward_step(self) -> None:
        """Prefill new requests if any are admitted, else decode the running ones."""
        with self.step_timer.phase("schedule"):
            new_batch = self.get_new_prefill_batch()
        if new_batch is not None:
            self.forward_prefill_batch(new_batch)
            self.cache_filled_batch(new_batch)
            self.running_batch.merge(new_batch)
        elif not self.running_batch.is_empty():
            self.forward_decode_run()
        elif not self.forward_queue:
            self.check_memory()
            self.new_token_ratio = max(global_config.init_new_token_ratio, self.min_new_token_ratio)

    @property
    def is_idle(self) -> bool:
        return not self.forward_queue and self.running_batch.is_empty()

    # -- messages ----------------------------------------------------------------------------------------

    def _dispatch(self, message: EngineInput) -> None:
        match message:
            case TokenizedGenerateReqInput():
                self.handle_generate_request(message)
            case AbortReq():
                self.abort_request(message.rid)
            case FlushCacheReq():
                self.output.control(ControlOut(message.rid, {"success": self.flush_cache()}))
            case GetInternalStateReq():
                self.output.control(ControlOut(message.rid, self.internal_state()))

    def handle_generate_request(self, recv_req: TokenizedGenerateReqInput) -> None:
        """Queue one request, or answer it at once where there is nothing to compute."""
        req = self.intake.make_req(recv_req)
        if req.finish_reason is None:
            self.forward_queue.append(req)
        else:
            self.output.add(req)

    def abort_request(self, rid: str) -> None:
        """Drop a request wherever it is; its slots and row come back at once (INV-FREE)."""
        for req in self.forward_queue:
            if req.rid == rid:
                self.forward_queue.remove(req)
                self._abort(req, "the request was aborted")
                return
        for i, req in enumerate(self.running_batch.reqs):
            if req.rid == rid:
                self.running_batch.release(req)
                self.running_batch.filter_batch([j for j in range(len(self.running_batch)) if j != i])
                self._abort(req, "the request was aborted")
                return

    def _abort(self, req: Req, message: str) -> None:
        req.finish(FinishReason.ABORT, message)
        self.output.add(req)

    def flush_cache(self) -> bool:
        """Forget every cached prefix. Refused, with False, while requests are waiting or running."""
        if not self.is_idle:
            return False
        self.tree_cache.evict(self.tree_cache.evictable_size(), self.token_to_kv_pool.free)
        self.tree_cache.reset()
        return True

    def internal_state(self) -> dict[str, int | float]:
        """The engine's state in numbers, as `/get_internal_state` reports it."""
        return {
            "size": self.token_to_kv_pool.size,
            "free": self.token_to_kv_pool.available_size(),
            "evictable": self.tree_cache.evictable_size(),
            "protected": self.tree_cache.protected_size(),
            "rows_used": self.req_to_token_pool.size - self.req_to_token_pool.can_use_mem_size,
            "rows_size": self.req_to_token_pool.size,
            "running": len(self.running_batch),
            "waiting": len(self.forward_queue),
            "new_token_ratio": self.new_token_ratio,
            "jumps": self.num_jumps,
            "jumped_tokens": self.num_jumped_tokens,
        } | self.stats.as_dict()

    def describe(self) -> dict[str, Any]:
        """What main must know of the engine before it takes requests."""
        return {
            "max_total_num_token": self.max_total_num_token,
            "max_req_input_len": self.intake.max_req_input_len,
            "context_len": self.model_config.context_len,
            "vocab_size": self.model_config.vocab_size,
            "device": str(self.model_runner.device),
            "dtype": str(self.model_runner.dtype).removeprefix("torch."),
            "attention": self.model_runner.attention,
        }

    # -- admission ---------------------------------------------------------------------------------------

    def get_new_prefill_batch(self) -> Batch | None:
        """Admit waiting requests, in the policy's order, as far as memory is expected to last.

        What running requests may still generate is weighed by ``new_token_ratio``; a new request is charged in
        full. Its prefix is locked before the decision stands, since locking makes those slots unevictable. The
        first request that does not fit ends the search: none may overtake it.
        """
        if not self.forward_queue or len(self.running_batch) >= self.max_num_running_seq:
            return None
        for req in self.forward_queue:
            req.prefix_indices, req.last_node = self.tree_cache.match_prefix(
                req.fill_ids[: req.max_prefix_len()]
            )

        expected = self.new_token_ratio * sum(req.max_new_tokens_left for req in self.running_batch.reqs)
        available = self.token_to_kv_pool.available_size() + self.tree_cache.evictable_size() - expected
        max_requests = min(
            self.max_num_running_seq - len(self.running_batch), self.req_to_token_pool.can_use_mem_size
        )
        admitted: list[Req] = []
        new_batch_total_tokens = new_batch_input_tokens = 0
        for req in self.scheduler.get_priority_queue(self.forward_queue):
            if len(admitted) == max_requests:
                break
            if new_batch_input_tokens + req.extend_len > self.max_prefill_tokens and admitted:
                break
            total_tokens = new_batch_total_tokens + req.extend_len + req.max_new_tokens_left
            if total_tokens >= available:
                break
            delta = self.tree_cache.inc_lock_ref(req.last_node)
            if total_tokens >= available + delta:
                self.tree_cache.dec_lock_ref(req.last_node)
                break
            available += delta
            admitted.append(req)
            new_batch_total_tokens = total_tokens
            new_batch_input_tokens += req.extend_len
        if not admitted:
            return None

        taken = set(admitted)
        self.forward_queue = [req for req in self.forward_queue if req not in taken]
        num_cached = sum(len(req.prefix_indices) for req in admitted)
        self.stats_log.prefill(
            len(admitted),
            num_cached,
            new_batch_input_tokens,
            len(self.forward_queue),
            len(self.running_batch),
        )
        return self._new_batch(admitted)

    def _new_batch(self, reqs: list[Req]) -> Batch:
        return Batch(reqs, self.req_to_token_pool, self.token_to_kv_pool, self.tree_cache, self.staging)

    # -- forward passes ----------------------------------------------------------------------------------

    def forward_prefill_batch(self, batch: Batch) -> None:
        """Compute the prompts' uncached tokens and the first token of each; finished requests leave."""
        with self.step_timer.phase("prepare"):
            batch.prepare_for_extend()
        with self.step_timer.phase("forward"):
            output = self.model_runner.forward(batch, ForwardMode.EXTEND)
        if output.prefill_token_logprobs is not None:
            add_prefill_logprobs(batch.reqs, output)
        for req, prefix_len in zip(batch.reqs, batch.prefix_lens_cpu, strict=True):
            if not req.output_ids:  # not a second prefill, after a retraction or a jump
                req.cached_tokens = prefix_len
        self.stats.forward_steps += 1
        self.stats.cached_tokens += sum(batch.prefix_lens_cpu)
        self.stats.prefill_tokens += batch.input_ids.numel()
        self._sample_and_finish(batch, output.next_token_logits)

    def forward_decode_run(self) -> None:
        """Decode several steps in a row, which saves looking at the queue; a stream's output ends the run, and so
        does a jump, which waits for its prefill."""
        for _ in range(self.num_continue_decode_steps):
            has_jumped = self.jump_forward(self.running_batch)
            if self.running_batch.is_empty():
                break
            self.forward_decode_batch(self.running_batch)
            if self.output.has_stream_output or has_jumped:
                break

    def jump_forward(self, batch: Batch) -> bool:
        """Send requests whose regex leaves no choice back to the queue with the forced text; whether there are any.

        They come to its front: they have been running, and others would wait for them if they had not jumped.
        This precedes the memory check, so that no retraction decides where a request jumps (INV-SAME).
        """
        with self.step_timer.phase("schedule"):
            jumped = batch.check_for_jump_forward(self.retokenizer)
        self.forward_queue[:0] = jumped
        self.num_jumps += len(jumped)
        self.num_jumped_tokens += sum(jump.num_new_tokens for jump in jumped.values())
        return bool(jumped)

    def forward_decode_batch(self, batch: Batch) -> None:
        """Compute one more token for every running request, after making room for it."""
        with self.step_timer.phase("schedule"):
            self._make_room(batch)
        if batch.is_empty():
            return
        with self.step_timer.phase("prepare"):
            batch.prepare_for_decode()
        with self.step_timer.phase("forward"):
            output = self.model_runner.forward(batch, ForwardMode.DECODE)
        self.stats.forward_steps += 1
        self.stats.decode_steps += 1
        self.stats.graph_replays = self.model_runner.num_graph_replays
        self._sample_and_finish(batch, output.next_token_logits)
        self.stats_log.decode(len(self.running_batch), len(self.forward_queue))

    def _make_room(self, batch: Batch) -> None:
        """Retract requests if the pool can't take one more token of each; a last one that can't grow ends.

        The estimate falls a little with every step that has room, and is set anew by every retraction.
        """
        forced = self.retract_every and self.stats.decode_steps % self.retract_every == self.retract_every - 1
        if batch.check_decode_mem() and not forced:
            decayed = self.new_token_ratio - global_config.new_token_ratio_decay
            self.new_token_ratio = max(decayed, self.min_new_token_ratio)
            return
        old_ratio = self.new_token_ratio
        retracted, self.new_token_ratio = batch.retract_decode()
        self.stats.retractions += len(retracted)
        self.forward_queue += retracted
        if retracted:
            logger.info(
                "decode out of memory: retracted %d, %d go on, #new_token_ratio: %.4f -> %.4f",
                len(retracted),
                len(batch),
                old_ratio,
                self.new_token_ratio,
            )
        if not batch.check_decode_mem():
            (req,) = batch.reqs
            batch.release(req)
            batch.filter_batch([])
            self._abort(
                req,
                f"the token pool ({self.max_total_num_token} slots) can't hold one more token: "
                "raise --max-total-tokens",
            )

    def _sample_and_finish(self, batch: Batch, logits: Tensor) -> None:
        with self.step_timer.phase("sample"):
            asked = model_logits(batch.reqs, logits)
            next_token_ids = batch.sample(logits)
        with self.step_timer.phase("emit"):
            if asked is not None:
                add_decode_logprobs(batch.reqs, next_token_ids, asked)
            for req, token_id in zip(batch.reqs, next_token_ids, strict=True):
                req.append_token(token_id)
            self.stats.generated_tokens += len(next_token_ids)
            self.handle_finished_requests(batch)

    def handle_finished_requests(self, batch: Batch) -> None:
        """Hand finished requests' tokens to the tree and their output, with that of streams, to the sender."""
        for req in batch.reqs:
            if req.finish_reason is not None:
                self._cache_finished(req)
            self.output.add_if_due(req)
        batch.filter_batch([i for i, req in enumerate(batch.reqs) if req.finish_reason is None])

    def _cache_finished(self, req: Req) -> None:
        """Insert the computed tokens into the tree, which takes over the slots it did not have."""
        self.tree_cache.cache_req(
            token_ids=req.fill_ids[: req.num_computed],
            last_uncached_pos=len(req.prefix_indices),
            req_pool_idx=req.req_pool_idx,
            old_last_node=req.last_node,
        )

    def cache_filled_batch(self, batch: Batch) -> None:
        """Share the prompts of requests that go on, right after their prefill; the tree takes their slots over."""
        for req in batch.reqs:
            req.prefix_indices, req.last_node = self.tree_cache.cache_req(
                token_ids=req.fill_ids[: req.num_computed],
                last_uncached_pos=len(req.prefix_indices),
                req_pool_idx=req.req_pool_idx,
                old_last_node=req.last_node,
                del_in_memory_pool=False,
            )

    def check_memory(self) -> None:
        """With nothing waiting or running, every slot is free or the tree's, and no row is taken (INV-FREE)."""
        available = self.token_to_kv_pool.available_size() + self.tree_cache.evictable_size()
        rows_taken = self.req_to_token_pool.size - self.req_to_token_pool.can_use_mem_size
        if available != self.max_total_num_token or rows_taken:
            logger.warning(
                "memory leak: %d of %d slots are available when idle, and %d request rows are taken",
                available,
                self.max_total_num_token,
                rows_taken,
            )
