"""From hidden states to what the scheduler needs: next-token logits, and log probabilities of prompts if wanted.

Part of the model of each rank, without state of its own. Log probabilities are the model's own: of the logits
before temperature, bias or mask. The rows of all prompts in a batch are scored together: a few large products
with the head instead of one or more for each prompt. Decoding needs nothing here: log probabilities of its
tokens come from the logits that a forward pass leaves, replayed or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .vocab_parallel_embedding import ParallelLMHead

if TYPE_CHECKING:
    from ..managers.controller.input_metadata import InputMetadata
if torch.cuda.is_available():
    from .get_selected_logprob import get_selected_logprob

LOGPROB_CHUNK_VALUES = 1 << 25
"""Logits of prompt tokens that exist at once: all of a long prompt's would need gigabytes."""


@dataclass
class TopLogprobs:
    """The best tokens of some rows, best first: ``logprobs`` float32 and ``token_ids`` int64 ``[rows, k]``."""

    logprobs: Tensor
    token_ids: Tensor


@dataclass
class LogitsProcessorOutput:
    """``next_token_logits`` float32 ``[bs, vocab]``, and of the tokens that `LogprobPlan` names, if there is one:

    ``prefill_token_logprobs`` float32 ``[scored]``, and ``prefill_top_logprobs`` of those that want top tokens.
    """

    next_token_logits: Tensor
    prefill_token_logprobs: Tensor | None = None
    prefill_top_logprobs: TopLogprobs | None = None


@dataclass
class LogprobPlan:
    """Which of a step's tokens are scored.

    ``rows`` int64 ``[scored]``: tokens whose logits say how probable their successor was, request by request;
    ``top_logprobs_nums``: of each of them, how many of the best tokens are wanted.
    """

    rows: Tensor
    top_logprobs_nums: list[int]


def plan_prompt_logprobs(
    start_lens: Sequence[int | None],
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
    top_logprobs_nums: Sequence[int],
    device: torch.device,
) -> LogprobPlan:
    """Plan to score each prompt's tokens after position ``start_lens[i]``; None leaves a request out.

    What is scored is never taken from the cache (`Req.max_prefix_len`), so a prefix ends at the start or before.
    """
    rows: list[int] = []
    nums: list[int] = []
    begin = 0
    for start, prefix_len, extend_len, num in zip(
        start_lens, prefix_lens, extend_lens, top_logprobs_nums, strict=True
    ):
        scored = range(0) if start is None else range(begin + start - prefix_len, begin + extend_len - 1)
        rows += scored
        nums += [num] * len(scored)
        begin += extend_len
    return LogprobPlan(torch.tensor(rows, dtype=torch.int64, device=device), nums)


class LogitsProcessor(nn.Module):
    """Applies the output head to each request's last token only, and to a prompt where its scores are wanted."""

    def forward(
        self, input_ids: Tensor, hidden_states: Tensor, lm_head: ParallelLMHead, input_metadata: InputMetadata
    ) -> LogitsProcessorOutput:
        """``hidden_states`` ``[tokens, hidden_size]`` of the step's ``input_ids`` ``[tokens]``."""
        last_index = input_metadata.last_token_index
        last_hidden = hidden_states if last_index is None else hidden_states.index_select(0, last_index)
        output = LogitsProcessorOutput(lm_head(last_hidden).float())
        if (plan := input_metadata.logprob_plan) is not None:
            output.prefill_token_logprobs, output.prefill_top_logprobs = prefill_logprobs(
                input_ids, hidden_states, lm_head, plan
            )
        return output


def prefill_logprobs(
    input_ids: Tensor, hidden_states: Tensor, lm_head: ParallelLMHead, plan: LogprobPlan
) -> tuple[Tensor, TopLogprobs | None]:
    """Log probability float32 ``[scored]`` of the token after each planned row, and the best tokens there."""
    chunk = max(1, LOGPROB_CHUNK_VALUES // lm_head.vocab_size)
    most = max(plan.top_logprobs_nums, default=0)
    scores = [torch.empty(0, dtype=torch.float32, device=hidden_states.device)]
    tops: list[TopLogprobs] = []
    for begin in range(0, len(plan.top_logprobs_nums), chunk):
        rows = plan.rows[begin : begin + chunk]
        logits = lm_head(hidden_states[rows])
        scores.append(selected_logprobs(logits, input_ids[rows + 1]))
        nums = plan.top_logprobs_nums[begin : begin + chunk]
        if asking := [i for i, num in enumerate(nums) if num > 0]:
            wanted = logits if len(asking) == len(nums) else logits[asking]
            tops.append(top_logprobs(wanted.float(), most))
    return torch.cat(scores), _concatenate(tops)


def top_logprobs(logits: Tensor, k: int) -> TopLogprobs:
    """The ``k`` best tokens of each row of ``logits`` float32 ``[rows, vocab]``, or all where there are fewer."""
    best = logits.topk(min(k, logits.shape[1]), dim=-1)
    return TopLogprobs(best.values - logits.logsumexp(dim=-1, keepdim=True), best.indices)


def _concatenate(tops: list[TopLogprobs]) -> TopLogprobs | None:
    if not tops:
        return None
    return TopLogprobs(torch.cat([top.logprobs for top in tops]), torch.cat([top.token_ids for top in tops]))


def selected_logprobs(logits: Tensor, next_ids: Tensor) -> Tensor:
    """Log probability of the token that followed each row: ``[rows, vocab]``, ``[rows]`` -> float32 ``[rows]``."""
    if logits.is_cuda:
        return get_selected_logprob(logits, next_ids)
    logits = logits.float()
    chosen = logits.gather(1, next_ids.long().unsqueeze(1)).squeeze(1)
    return chosen - logits.logsumexp(dim=-1)
