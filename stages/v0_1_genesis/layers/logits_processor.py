"""From hidden states to what the scheduler needs: next-token logits, and a score of the prompt if wanted.

Part of the model of each rank, without state of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .vocab_parallel_embedding import ParallelLMHead

if TYPE_CHECKING:
    from ..managers.router.model_runner import InputMetadata
if torch.cuda.is_available():
    from .get_selected_logprob import get_selected_logprob

LOGPROB_CHUNK = 256
"""Prompt tokens whose logits exist at once: all of a long prompt's would need gigabytes."""


@dataclass
class LogitsProcessorOutput:
    """``next_token_logits`` float32 ``[bs, vocab]``; ``normalized_prompt_logprobs`` float32 ``[bs]`` or None."""

    next_token_logits: Tensor
    normalized_prompt_logprobs: Tensor | None = None


class LogitsProcessor(nn.Module):
    """Applies the output head to each request's last token only, and to a prompt where its score is wanted."""

    def forward(
        self, input_ids: Tensor, hidden_states: Tensor, lm_head: ParallelLMHead, input_metadata: InputMetadata
    ) -> LogitsProcessorOutput:
        """``hidden_states`` ``[tokens, hidden_size]`` of the step's ``input_ids`` ``[tokens]``."""
        last_index = input_metadata.last_token_index
        last_hidden = hidden_states if last_index is None else hidden_states.index_select(0, last_index)
        output = LogitsProcessorOutput(lm_head(last_hidden).float())
        if input_metadata.logprob_spans is not None:
            means = [
                mean_logprob(input_ids[span], hidden_states[span], lm_head)
                for span in input_metadata.logprob_spans
            ]
            output.normalized_prompt_logprobs = torch.stack(means)
        return output


def mean_logprob(input_ids: Tensor, hidden_states: Tensor, lm_head: ParallelLMHead) -> Tensor:
    """Mean log probability, float32 ``[]``, of a span's tokens, each given those before it.

    The first token, whose logits lie before the span, is left out; 0 where that leaves no token.
    """
    hidden_states, next_ids = hidden_states[:-1], input_ids[1:]
    total = torch.zeros((), dtype=torch.float32, device=hidden_states.device)
    for hidden, ids in zip(hidden_states.split(LOGPROB_CHUNK), next_ids.split(LOGPROB_CHUNK), strict=True):
        total += selected_logprobs(lm_head(hidden), ids).sum()
    return total / max(len(next_ids), 1)


def selected_logprobs(logits: Tensor, next_ids: Tensor) -> Tensor:
    """Log probability of the token that followed each row: ``[rows, vocab]``, ``[rows]`` -> float32 ``[rows]``."""
    if logits.is_cuda:
        return get_selected_logprob(logits, next_ids)
    logits = logits.float()
    chosen = logits.gather(1, next_ids.long().unsqueeze(1)).squeeze(1)
    return chosen - logits.logsumexp(dim=-1)
