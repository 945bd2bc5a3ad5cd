"""From a prompt to a request for the engine: checked against every limit, tokenized, clamped.

Main only; one RequestTokenizer lives as long as the server, an item as long as its HTTP request.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ..hf_transformers_utils import Tokenizer
from ..sampling_params import SamplingParams
from ..support.http_errors import bad_request
from .engine_info import EngineInfo
from .io_struct import MAX_LOGPROBS, MAX_TOP_LOGPROBS, TokenizedGenerateReqInput

MAX_ANSWERS = 1024
"""Answers of one HTTP request: its prompts times n."""

INLINE_CHARACTERS = 4096
"""Texts up to this length are tokenized on the event loop; longer ones in a thread, so that others go on."""


@dataclass(slots=True)
class GenerateItem:
    """One prompt as a client gave it: text or token ids, and how to go on from there.

    ``param`` names the prompt's field in errors; ``unlimited`` means as many new tokens as the limits allow. With
    ``logprob_start_len`` None the output alone is scored.
    """

    prompt: str | list[int]
    sampling_params: SamplingParams
    param: str
    rid: str | None = None
    unlimited: bool = False
    add_special_tokens: bool = True
    return_logprob: bool = False
    logprob_start_len: int | None = 0
    top_logprobs_num: int = 0


class RequestTokenizer:
    """Knows the tokenizer and the engine's limits; every refusal is an `ApiError` 400 naming field and limit."""

    def __init__(self, tokenizer: Tokenizer, engine: EngineInfo) -> None:
        self._tokenizer = tokenizer
        self._engine = engine

    async def tokenize(self, items: Sequence[GenerateItem], stream: bool) -> list[TokenizedGenerateReqInput]:
        """One request per item, in order; nothing is sent yet, so one bad item fails the whole call."""
        for item in items:
            self._check(item)
        _check_answers(items)
        if sum(len(item.prompt) for item in items if isinstance(item.prompt, str)) > INLINE_CHARACTERS:
            requests = await asyncio.to_thread(self._tokenize_all, items, stream)
        else:
            requests = self._tokenize_all(items, stream)
        _check_logprobs(requests)
        return requests

    def _check(self, item: GenerateItem) -> None:
        """All that can be checked without tokenizing."""
        try:
            item.sampling_params.verify(self._engine.vocab_size)
        except ValueError as error:  # whose text begins with the field's name
            raise bad_request(str(error), str(error).partition(" ")[0]) from None
        if not 0 <= item.top_logprobs_num <= MAX_TOP_LOGPROBS:
            raise bad_request(
                f"top_logprobs_num must be in [0, {MAX_TOP_LOGPROBS}], got {item.top_logprobs_num}.",
                "top_logprobs_num",
            )
        if isinstance(item.prompt, str):
            self._check_characters(item, len(item.prompt))
        else:
            self._check_length(item, len(item.prompt))
            self._check_ids(item, item.prompt)

    def _check_characters(self, item: GenerateItem, count: int) -> None:
        """Refuse what must have too many tokens however it is cut, before spending time on it."""
        limit = self._engine.max_prompt_tokens * self._tokenizer.longest_token
        if count > limit:
            raise bad_request(
                f"{item.param} has {count} characters; this server takes at most {limit}, and "
                f"{self._engine.limits}.",
                item.param,
            )

    def _check_length(self, item: GenerateItem, num_tokens: int) -> None:
        if num_tokens == 0:
            raise bad_request(f"{item.param} must not be empty.", item.param)
        if num_tokens > self._engine.max_prompt_tokens:
            raise bad_request(
                f"{item.param} has {num_tokens} tokens; this server takes {self._engine.limits}.", item.param
            )

    def _check_ids(self, item: GenerateItem, ids: list[int]) -> None:
        lowest, highest = min(ids), max(ids)
        wrong = lowest if lowest < 0 else highest
        if not 0 <= wrong < self._engine.vocab_size:
            raise bad_request(
                f"{item.param} holds the token id {wrong}; ids go from 0 to {self._engine.vocab_size - 1}.",
                item.param,
            )

    def _tokenize_all(self, items: Sequence[GenerateItem], stream: bool) -> list[TokenizedGenerateReqInput]:
        return [self._tokenize_one(item, stream) for item in items]

    def _tokenize_one(self, item: GenerateItem, stream: bool) -> TokenizedGenerateReqInput:
        input_ids = item.prompt
        if isinstance(input_ids, str):
            input_ids = self._tokenizer.encode(input_ids, item.add_special_tokens)
            self._check_length(item, len(input_ids))
            self._check_ids(item, input_ids)  # a tokenizer may know tokens that the model has no row for
        start_len = len(input_ids) - 1 if item.logprob_start_len is None else item.logprob_start_len
        if not 0 <= start_len < len(input_ids):
            raise bad_request(
                f"logprob_start_len must be in [0, {len(input_ids) - 1}], the prompt's last position; "
                f"got {start_len}.",
                "logprob_start_len",
            )
        return TokenizedGenerateReqInput(
            rid=item.rid or uuid.uuid4().hex,
            input_ids=input_ids,
            sampling_params=self._clamp(item, len(input_ids)),
            stream=stream,
            return_logprob=item.return_logprob,
            logprob_start_len=start_len,
            top_logprobs_num=item.top_logprobs_num,
        )

    def _clamp(self, item: GenerateItem, num_tokens: int) -> SamplingParams:
        """Parameters as the engine gets them: no count larger than what can ever matter."""
        params, room = item.sampling_params, self._engine.max_new_tokens(num_tokens)
        return msgspec.structs.replace(
            params,
            max_new_tokens=room if item.unlimited else min(params.max_new_tokens, room),
            top_k=min(params.top_k, self._engine.vocab_size),
        )


def _check_answers(items: Sequence[GenerateItem]) -> None:
    """Refuse what has no one way to be listed, and too much of what has."""
    counts = {item.sampling_params.n for item in items}
    if len(counts) > 1:
        raise bad_request(f"n must be the same for all prompts, got {sorted(counts)}.", "n")
    if len(items) * max(counts) > MAX_ANSWERS:
        raise bad_request(
            f"n: {len(items)} prompts with {max(counts)} answers each are over the limit of {MAX_ANSWERS} answers.",
            "n",
        )


def _check_logprobs(requests: Sequence[TokenizedGenerateReqInput]) -> None:
    """Refuse an answer whose lists of log probabilities could not be carried."""
    num_entries = 0
    for request in requests:
        if request.return_logprob:
            params = request.sampling_params
            num_tokens = len(request.input_ids) - request.logprob_start_len + params.max_new_tokens
            num_entries += params.n * num_tokens * (1 + request.top_logprobs_num)
    if num_entries > MAX_LOGPROBS:
        raise bad_request(
            f"return_logprob: the answer may hold {num_entries} log probabilities, the limit is {MAX_LOGPROBS}; "
            "lower top_logprobs_num, max_new_tokens or n, raise logprob_start_len, or send fewer prompts at once.",
            "return_logprob",
        )
