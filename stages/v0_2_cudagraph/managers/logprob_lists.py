"""Log probabilities as `/generate` reports them: lists of ``[log probability, token id, text or null]``.

Main only; pure functions on one answer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .call import ReqState
from .io_struct import Logprobs, TokenLogprob

TextOf = Callable[[int], str]
"""The text of a token id."""


def logprob_lists(state: ReqState, text_of: TextOf | None) -> dict[str, Any]:
    """The entries of ``meta_info``; none if the request did not ask. Without ``text_of`` every text is null.

    ``prefill_token_logprobs`` has the prompt's tokens after ``logprob_start_len``, and, from 0 on, the first
    token too, with null; ``decode_token_logprobs`` has one entry for each of ``completion_tokens``.
    """
    if state.logprobs is None:
        return {}
    prompt = state.prefill.logprobs or Logprobs()
    return {
        "prefill_token_logprobs": _entries(prompt.prefill_token_logprobs, text_of),
        "decode_token_logprobs": _entries(state.logprobs.decode_token_logprobs, text_of),
        "prefill_top_logprobs": [
            None if top is None else _entries(top, text_of) for top in prompt.prefill_top_logprobs
        ],
        "decode_top_logprobs": [_entries(top, text_of) for top in state.logprobs.decode_top_logprobs],
        "normalized_prompt_logprob": prompt.normalized_prompt_logprob,
    }


def _entries(logprobs: Sequence[TokenLogprob], text_of: TextOf | None) -> list[list[Any]]:
    return [
        [logprob, token_id, None if text_of is None else text_of(token_id)] for logprob, token_id in logprobs
    ]
