"""Log probabilities of one request's tokens, from a step's tensors to the request's next message.

A ReqLogprobs belongs to a Req that asked for them and lives as long; it holds what was not sent yet. All numbers
are the model's own, of logits before temperature, bias or mask, so that they say what the model thinks of a
token whatever chose it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...layers.logits_processor import LogitsProcessorOutput, TopLogprobs, selected_logprobs, top_logprobs
from ..io_struct import Logprobs, TokenLogprob

if TYPE_CHECKING:
    from .infer_batch import Req


class ReqLogprobs:
    """What one request wants to know, and what it knows and has not told.

    Args:
        start_len: the prompt's tokens after this position are scored; from 0 on the first token is listed too.
        top_logprobs_num: how many of the best tokens are listed at each place.
    """

    def __init__(self, start_len: int, top_logprobs_num: int) -> None:
        self.start_len = start_len
        self.top_logprobs_num = top_logprobs_num
        self.has_prefill = False
        """Whether the prompt has been scored; a retracted request's second prefill need not do it again."""
        self._unsent = Logprobs()

    def add_prefill(
        self, input_ids: Sequence[int], scores: Sequence[float], tops: Iterator[list[TokenLogprob]]
    ) -> None:
        """Take in the prompt's ``scores``; ``tops`` has as many entries more if top tokens are wanted."""
        new = self._unsent
        if self.start_len == 0:
            new.prefill_token_logprobs.append((None, input_ids[0]))
        scored_ids = input_ids[self.start_len + 1 :]
        new.prefill_token_logprobs += zip(scores, scored_ids, strict=True)
        new.normalized_prompt_logprob = math.fsum(scores) / max(len(scores), 1)
        if num := self.top_logprobs_num:
            first: list[None] = [None] if self.start_len == 0 else []
            new.prefill_top_logprobs += [*first, *(next(tops)[:num] for _ in scored_ids)]
        self.has_prefill = True

    def add_decode(self, token_id: int, score: float, top: list[TokenLogprob]) -> None:
        """Take in what the next token is, and what might have been."""
        self._unsent.decode_token_logprobs.append((score, token_id))
        if num := self.top_logprobs_num:
            self._unsent.decode_top_logprobs.append(top[:num])

    @property
    def num_unsent(self) -> int:
        return self._unsent.num_entries

    def take_unsent(self) -> Logprobs:
        """What is new since the last call."""
        taken, self._unsent = self._unsent, Logprobs()
        return taken


def add_prefill_logprobs(reqs: Sequence[Req], output: LogitsProcessorOutput) -> None:
    """Give every request that waits for its prompt's log probabilities its share of a prefill's ``output``."""
    assert output.prefill_token_logprobs is not None
    scores, begin = output.prefill_token_logprobs.tolist(), 0
    tops = iter(_lists(output.prefill_top_logprobs))
    for req in reqs:
        if (wanted := req.logprobs) is not None and not wanted.has_prefill:
            end = begin + len(req.input_ids) - wanted.start_len - 1
            wanted.add_prefill(req.input_ids, scores[begin:end], tops)
            begin = end


def model_logits(reqs: Sequence[Req], logits: Tensor) -> Tensor | None:
    """A copy ``[asking, vocab]`` of the rows of ``logits`` ``[bs, vocab]`` whose requests ask for log probabilities.

    Taken before the sampler changes them; None where nobody asks, which costs nothing.
    """
    asking = [row for row, req in enumerate(reqs) if req.logprobs is not None]
    return logits[asking] if asking else None


def add_decode_logprobs(reqs: Sequence[Req], next_token_ids: Sequence[int], logits: Tensor) -> None:
    """Give every request that asks the log probability of its next token; ``logits`` are `model_logits`."""
    asking = [(req, req.logprobs, token_id) for req, token_id in zip(reqs, next_token_ids, strict=True)]
    ids = [token_id for _, wanted, token_id in asking if wanted is not None]
    most = max(wanted.top_logprobs_num for _, wanted, _ in asking if wanted is not None)
    scores = iter(selected_logprobs(logits, torch.tensor(ids, device=logits.device)).tolist())
    tops = iter(_lists(top_logprobs(logits, most)) if most else [[]] * len(ids))
    for req, wanted, token_id in asking:
        if wanted is None:
            continue
        score, top = next(scores), next(tops)
        if req.max_new_tokens > 0:  # one that came for its prompt alone is not told the token
            wanted.add_decode(token_id, score, top)


def _lists(top: TopLogprobs | None) -> list[list[TokenLogprob]]:
    """Each row's best tokens on the host."""
    if top is None:
        return []
    rows = zip(top.logprobs.tolist(), top.token_ids.tolist(), strict=True)
    return [list(zip(logprobs, token_ids, strict=True)) for logprobs, token_ids in rows]
