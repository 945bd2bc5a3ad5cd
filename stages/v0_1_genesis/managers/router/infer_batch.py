"""Requests as the scheduler sees them, and the batch that goes through the model together.

Owned by the ModelRpcServer of each rank. A Req lives from arrival to its last token; a Batch is built by
a fill and then merged into the one running batch, which shrinks and grows as requests come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...constrained.fsm import START, RegexFSM
from ...memory_pool import ReqToTokenPool, TokenToKVPool
from ...sampling_params import SamplingParams
from ...support.staging import StagingBuffer
from ...support.text_stream import IncrementalDetokenizer, StopStringFilter
from .batch_sampling import sample_tokens
from .radix_cache import RadixCache, TreeNode

if TYPE_CHECKING:
    from ...hf_transformers_utils import Tokenizer

RETRACT_DECODE_STEPS = 20
"""A retraction frees room for this many further steps of the requests that stay."""


class ForwardMode(Enum):
    """What a forward pass computes: whole prompts, the uncached rest of prompts, or one token each."""

    PREFILL = auto()
    EXTEND = auto()
    DECODE = auto()


class FinishReason(Enum):
    """Why a request ended."""

    LENGTH = auto()
    EOS_TOKEN = auto()
    STOP_STR = auto()
    ABORT = auto()


class Req:
    """One request: its tokens, its place in the pools, and how far it has come.

    ``prefix_indices`` ``[prefix_len]`` are the slots found in the tree, ``last_node`` the node where that
    prefix ends; both are set anew by every match, and hold from admission on because the path is locked.
    """

    req_pool_idx: int
    prefix_indices: Tensor
    last_node: TreeNode

    def __init__(
        self,
        rid: str,
        input_ids: list[int],
        sampling_params: SamplingParams,
        stream: bool,
        tokenizer: Tokenizer,
    ) -> None:
        self.rid = rid
        self.input_ids = input_ids
        self.output_ids: list[int] = []
        self.sampling_params = sampling_params
        self.max_new_tokens = sampling_params.max_new_tokens
        self.seed = 0 if sampling_params.seed is None else sampling_params.seed
        self.stream = stream
        self.eos_token_ids = tokenizer.eos_token_ids
        self.cached_tokens = 0
        self.num_sent_tokens = 0
        self.return_normalized_logprob = False
        self.normalized_logprob_start_len = 0
        self.normalized_prompt_logprob: float | None = None
        self.finish_reason: FinishReason | None = None
        self.finish_detail: str | int = ""
        self.allowed_token_ids: Tensor | None = None
        """When set, the only ids that the next token may have."""
        self.regex_fsm: RegexFSM | None = None
        self.regex_fsm_state = START
        self._stop_filter: StopStringFilter | None = None
        if stops := sampling_params.stop_strs:
            self._detokenizer = IncrementalDetokenizer(tokenizer, sampling_params.skip_special_tokens)
            self._stop_filter = StopStringFilter(stops)

    @property
    def fill_ids(self) -> list[int]:
        """Every token whose K and V the next prefill must leave in the pool."""
        return self.input_ids + self.output_ids

    @property
    def seq_len(self) -> int:
        return len(self.input_ids) + len(self.output_ids)

    @property
    def num_completion_tokens(self) -> int:
        return min(len(self.output_ids), self.max_new_tokens)

    @property
    def num_computed(self) -> int:
        """Tokens of a running request that have K and V in the pool: all but the newest."""
        return self.seq_len - 1

    @property
    def extend_len(self) -> int:
        """Tokens that a prefill has to compute; at least one (INV-ONE)."""
        return self.seq_len - len(self.prefix_indices)

    @property
    def max_new_tokens_left(self) -> int:
        return self.max_new_tokens - len(self.output_ids)

    def max_prefix_len(self) -> int:
        """How much of the prompt may come from the cache: the last token's logits are always computed
        (INV-ONE), and so are those that a prompt logprob is the mean of."""
        if self.wants_prompt_logprob:
            return min(self.normalized_logprob_start_len, self.seq_len - 1)
        return self.seq_len - 1

    @property
    def wants_prompt_logprob(self) -> bool:
        """Whether the next prefill has to score the prompt; after a retraction it is known already."""
        return self.return_normalized_logprob and self.normalized_prompt_logprob is None

    def append_token(self, token_id: int) -> None:
        """Take the next token and decide whether the request ends with it."""
        self.output_ids.append(token_id)
        if self.regex_fsm is not None:
            self.regex_fsm_state = self.regex_fsm.next_state(self.regex_fsm_state, token_id)
        # A regex allows the end only where the text may end; then it is no end to be ignored.
        ignores_eos = self.sampling_params.ignore_eos and self.regex_fsm is None
        if self.max_new_tokens == 0:  # it came for its prompt's logprob alone, and is not told the token
            self.finish(FinishReason.LENGTH, 0)
        elif token_id in self.eos_token_ids and not ignores_eos:
            self.finish(FinishReason.EOS_TOKEN, token_id)
        elif self.max_new_tokens_left <= 0:
            self.finish(FinishReason.LENGTH, self.max_new_tokens)
        if self._stop_filter is not None and self.max_new_tokens > 0:
            self._check_stop_strings(self._stop_filter, token_id)

    def finish(self, reason: FinishReason, detail: str | int) -> None:
        self.finish_reason, self.finish_detail = reason, detail

    def take_unsent_tokens(self) -> list[int]:
        """Output since the last call, without the end-of-sequence token that ended it."""
        end = self.num_completion_tokens - (self.finish_reason is FinishReason.EOS_TOKEN)
        tail = self.output_ids[self.num_sent_tokens : end]
        self.num_sent_tokens = len(self.output_ids)
        return tail

    def finish_reason_object(self) -> dict[str, Any] | None:
        """The finish reason as `/generate` reports it."""
        match self.finish_reason:
            case None:
                return None
            case FinishReason.LENGTH:
                return {"type": "length", "length": self.finish_detail}
            case FinishReason.ABORT:
                return {"type": "abort", "message": self.finish_detail}
            case _:
                return {"type": "stop", "matched": self.finish_detail}

    def _check_stop_strings(self, stop_filter: StopStringFilter, token_id: int) -> None:
        stop_filter.push(self._detokenizer.push([token_id]))
        if self.finish_reason is not None:
            # A match may have waited for a longer one that began before it; now nothing more will come.
            stop_filter.push(self._detokenizer.flush())
            stop_filter.flush()
        if stop_filter.matched is not None:
            self.finish(FinishReason.STOP_STR, stop_filter.matched)


class Batch:
    """Requests that go through the model together, and the tensors of their next forward pass.

    What the requests know on the host is the truth; each step's tensors are made from it in one staging
    copy, so merging, filtering and retracting are list operations. After `init_extend_batch` or
    `update_for_decode` these hold, with ``tokens`` the number of tokens to compute (``bs`` in decode):

    - ``input_ids``, ``positions``, ``out_cache_loc`` ``[tokens]``: ids, positions and slots of new tokens
    - ``req_pool_indices``, ``seq_lens``, ``prefix_lens`` ``[bs]``; ``seq_lens`` counts the new tokens too
    - ``seq_lens_cpu``, ``prefix_lens_cpu``: the same on the host
    - ``out_cache_cont_start``, ``out_cache_cont_end``: set when the new slots are one contiguous range
    """

    input_ids: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    prefix_lens: Tensor
    seq_lens_cpu: list[int]
    prefix_lens_cpu: list[int]

    def __init__(
        self,
        reqs: list[Req],
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
        tree_cache: RadixCache,
        staging: StagingBuffer,
    ) -> None:
        self.reqs = reqs
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool = token_to_kv_pool
        self.tree_cache = tree_cache
        self.staging = staging
        self.out_cache_cont_start: int | None = None
        self.out_cache_cont_end: int | None = None

    def __len__(self) -> int:
        return len(self.reqs)

    def is_empty(self) -> bool:
        return not self.reqs

    @property
    def return_normalized_logprob(self) -> bool:
        return any(req.wants_prompt_logprob for req in self.reqs)

    @property
    def normalized_logprob_start_lens(self) -> list[int | None]:
        """After which prompt position each request's mean begins; None for one that wants none now."""
        return [req.normalized_logprob_start_len if req.wants_prompt_logprob else None for req in self.reqs]

    # -- before a forward pass -------------------------------------------------------------------------

    def init_extend_batch(self) -> ForwardMode:
        """Give every request a row and slots for what its prefix lacks; return the mode that serves it."""
        rows = self.req_to_token_pool.alloc(len(self.reqs))
        assert rows is not None, "admission checks the number of rows"
        for req, row in zip(self.reqs, rows.tolist(), strict=True):
            req.req_pool_idx = row

        self.prefix_lens_cpu = [len(req.prefix_indices) for req in self.reqs]
        self.seq_lens_cpu = [req.seq_len for req in self.reqs]
        spans = list(zip(self.prefix_lens_cpu, self.seq_lens_cpu, strict=True))
        (
            self.input_ids,
            self.positions,
            self.req_pool_indices,
            self.seq_lens,
            self.prefix_lens,
        ) = self.staging.upload(
            [t for req, (start, end) in zip(self.reqs, spans, strict=True) for t in req.fill_ids[start:end]],
            [position for start, end in spans for position in range(start, end)],
            [req.req_pool_idx for req in self.reqs],
            self.seq_lens_cpu,
            self.prefix_lens_cpu,
        )
        self.out_cache_loc = self._alloc_slots(self.input_ids.numel())
        self.out_cache_cont_start = self.out_cache_cont_end = None
        self._write_rows(spans)
        return ForwardMode.EXTEND if any(self.prefix_lens_cpu) else ForwardMode.PREFILL

    def update_for_decode(self) -> None:
        """Give every request the slot of its last token, whose K and V the next forward pass computes."""
        self.seq_lens_cpu = [req.seq_len for req in self.reqs]
        self.input_ids, self.positions, self.req_pool_indices, self.seq_lens = self.staging.upload(
            [req.output_ids[-1] for req in self.reqs],
            [seq_len - 1 for seq_len in self.seq_lens_cpu],
            [req.req_pool_idx for req in self.reqs],
            self.seq_lens_cpu,
        )
        self._alloc_decode_slots()
        self.req_to_token_pool.req_to_token[self.req_pool_indices, self.positions] = self.out_cache_loc

    def _alloc_decode_slots(self) -> None:
        """On the CPU, a contiguous range if there is one: layers store K and V as a slice, not by index.

        On a GPU their kernel stores to any slots alike, and the search would only make the host wait.
        """
        need_size, contiguous = len(self.reqs), None
        if self.input_ids.device.type == "cpu":
            contiguous = self.token_to_kv_pool.alloc_contiguous(need_size)
        slots = (self._alloc_slots(need_size), None, None) if contiguous is None else contiguous
        self.out_cache_loc, self.out_cache_cont_start, self.out_cache_cont_end = slots

    def _alloc_slots(self, need_size: int) -> Tensor:
        self._evict_to(need_size)
        slots = self.token_to_kv_pool.alloc(need_size)
        if slots is None:
            raise RuntimeError(
                f"the token pool has {self.token_to_kv_pool.available_size()} free slots, not {need_size}"
            )
        return slots

    def _evict_to(self, need_size: int) -> bool:
        """Evict until ``need_size`` slots are free, as far as the tree can; say whether they are."""
        lacking = need_size - self.token_to_kv_pool.available_size()
        if lacking > 0:
            self.tree_cache.evict(lacking, self.token_to_kv_pool.free)
        return self.token_to_kv_pool.available_size() >= need_size

    def _write_rows(self, spans: Sequence[tuple[int, int]]) -> None:
        table, offset = self.req_to_token_pool.req_to_token, 0
        for req, (start, end) in zip(self.reqs, spans, strict=True):
            table[req.req_pool_idx, :start] = req.prefix_indices
            table[req.req_pool_idx, start:end] = self.out_cache_loc[offset : offset + end - start]
            offset += end - start

    # -- memory ----------------------------------------------------------------------------------------

    def check_decode_mem(self) -> bool:
        """Whether every request can get one more slot, evicting from the tree where that helps."""
        return self._evict_to(len(self.reqs))

    def retract_decode(self) -> list[Req]:
        """Take requests out until the rest have room for some steps; return those taken, ready to wait.

        The ones with the least output go first (ties: the longest prompt), since they lose least work.
        One request always stays. Output tokens are kept: the next prefill computes their K and V again.
        """
        order = sorted(range(len(self.reqs)), key=lambda i: self._work_done(self.reqs[i]), reverse=True)
        retracted: list[Req] = []
        while len(order) > 1 and (not retracted or not self._evict_to(len(order) * RETRACT_DECODE_STEPS)):
            req = self.reqs[order.pop()]
            self.release(req, req.num_computed)
            retracted.append(req)
        self.filter_batch(sorted(order))
        return retracted

    @staticmethod
    def _work_done(req: Req) -> tuple[int, int]:
        return len(req.output_ids), -len(req.input_ids)

    def release(self, req: Req, num_held: int) -> None:
        """Give back ``req``'s row, its lock, and its hold on the first ``num_held`` slots of its row."""
        held = self.req_to_token_pool.req_to_token[req.req_pool_idx, :num_held]
        self.token_to_kv_pool.free(held)
        self.req_to_token_pool.free([req.req_pool_idx])
        self.tree_cache.dec_ref_counter(req.last_node)

    # -- membership ------------------------------------------------------------------------------------

    def filter_batch(self, keep_indices: Sequence[int]) -> None:
        self.reqs = [self.reqs[i] for i in keep_indices]

    def merge(self, other: Batch) -> None:
        self.reqs = self.reqs + other.reqs

    # -- after a forward pass --------------------------------------------------------------------------

    def sample(self, logits: Tensor) -> list[int]:
        """One token a request from ``logits`` ``[bs, vocab]``, which it may change."""
        return sample_tokens(self.reqs, logits)
