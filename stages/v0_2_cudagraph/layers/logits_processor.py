"""From hidden states to what the scheduler needs: next-token logits, and a score of the prompt if wanted.

Part of the model of each rank, without state of its own. A prompt's score is the mean log probability of its
tokens after a start position. The rows of all prompts in a batch are scored together: a few large products
with the head instead of one or more for each prompt.
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
class LogitsProcessorOutput:
    """``next_token_logits`` float32 ``[bs, vocab]``; ``normalized_prompt_logprobs`` float32 ``[bs]`` or None."""

    next_token_logits: Tensor
    normalized_prompt_logprobs: Tensor | None = None


@dataclass
class LogprobPlan:
    """Which of a step's tokens are scored.

    ``rows`` int64 ``[scored]``: tokens whose logits say how probable their successor was, request by request;
    ``counts`` int64 ``[bs]``: how many of them each request has.
    """

    rows: Tensor
    counts: Tensor


def plan_prompt_logprobs(
    start_lens: Sequence[int | None],
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
    device: torch.device,
) -> LogprobPlan:
    """Plan to score each prompt's tokens after position ``start_lens[i]``; None leaves a request out.

    What a mean needs is never taken from the cache (`Req.max_prefix_len`), so a prefix ends at the start or before.
    """
    rows: list[int] = []
    counts: list[int] = []
    begin = 0
    for start, prefix_len, extend_len in zip(start_lens, prefix_lens, extend_lens, strict=True):
        scored = range(0) if start is None else range(begin + start - prefix_len, begin + extend_len - 1)
        rows += scored
        counts.append(len(scored))
        begin += extend_len
    return LogprobPlan(
        torch.tensor(rows, dtype=torch.int64, device=device),
        torch.tensor(counts, dtype=torch.int64, device=device),
    )


class LogitsProcessor(nn.Module):
    """Applies the output head to each request's last token only, and to a prompt where its score is wanted."""

    def forward(
        self, input_ids: Tensor, hidden_states: Tensor, lm_head: ParallelLMHead, input_metadata: InputMetadata
    ) -> LogitsProcessorOutput:
        """``hidden_states`` ``[tokens, hidden_size]`` of the step's ``input_ids`` ``[tokens]``."""
        last_index = input_metadata.last_token_index
        last_hidden = hidden_states if last_index is None else hidden_states.index_select(0, last_index)
        output = LogitsProcessorOutput(lm_head(last_hidden).float())
        if (plan := input_metadata.logprob_plan) is not None:
            output.normalized_prompt_logprobs = mean_logprobs(input_ids, hidden_states, lm_head, plan)
        return output


def mean_logprobs(
    input_ids: Tensor, hidden_states: Tensor, lm_head: ParallelLMHead, plan: LogprobPlan
) -> Tensor:
    """Each request's mean log probability of its scored tokens, float32 ``[bs]``; 0 where there is none."""
    if plan.rows.numel() == 0:
        return torch.zeros(plan.counts.shape, dtype=torch.float32, device=plan.counts.device)
    chunk = max(1, LOGPROB_CHUNK_VALUES // lm_head.vocab_size)
    scores = [
        selected_logprobs(lm_head(hidden_states[rows]), input_ids[rows + 1])
        for rows in plan.rows.split(chunk)
    ]
    sums = torch.segment_reduce(torch.cat(scores), "sum", lengths=plan.counts, initial=0.0, unsafe=True)
    return sums / plan.counts.clamp(min=1)


def selected_logprobs(logits: Tensor, next_ids: Tensor) -> Tensor:
    """Log probability of the token that followed each row: ``[rows, vocab]``, ``[rows]`` -> float32 ``[rows]``."""
    if logits.is_cuda:
        return get_selected_logprob(logits, next_ids)
    logits = logits.float()
    chosen = logits.gather(1, next_ids.long().unsqueeze(1)).squeeze(1)
    return chosen - logits.logsumexp(dim=-1)
