"""The ``logprobs`` object of a completion: four lists that run in parallel, handed out as an answer grows.

Main only; one CompletionLogprobs for each choice of a request, as long as it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..hf_transformers_utils import Tokenizer
from ..managers.call import ReqState
from ..managers.io_struct import Logprobs, TokenLogprob
from ..support.text_stream import IncrementalDetokenizer


class CompletionLogprobs:
    """One choice's tokens as OpenAI lists them.

    ``text_offset`` is the character of the choice's text at which a token begins, that of an echoed prompt
    included; what a stop string cut off lies beyond the text's end. A token that is only a part of a
    character shows as U+FFFD, and begins where the character does.

    Args:
        echo: the prompt's text, if it is part of the choice.
        has_top: whether ``top_logprobs`` are wanted; they always hold the token itself too, as OpenAI has it.
    """

    def __init__(self, tokenizer: Tokenizer, echo: str | None, has_top: bool, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._echo = echo
        self._has_top = has_top
        self._offset = 0
        self._num_shown = 0
        self._begin_text(skip_special)

    def take(self, state: ReqState) -> dict[str, Any]:
        """The tokens that ``state`` has and no earlier call returned; the first call begins with an echo."""
        shown: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if self._echo is not None:
            self._add_echo(shown, self._echo, state.prefill.logprobs or Logprobs())
            self._echo = None
        output = state.logprobs or Logprobs()
        tops = output.decode_top_logprobs if self._has_top else [None] * len(output.decode_token_logprobs)
        for position in range(self._num_shown, len(output.decode_token_logprobs)):
            self._add(shown, output.decode_token_logprobs[position], tops[position])
        self._num_shown = len(output.decode_token_logprobs)
        if not self._has_top:
            shown["top_logprobs"] = None
        return shown

    def _add_echo(self, shown: dict[str, Any], echo: str, prompt: Logprobs) -> None:
        ids = [token_id for _, token_id in prompt.prefill_token_logprobs]
        # What a tokenizer puts before a text (a special token, a space) is none of it.
        self._offset = len(echo) - len(self._tokenizer.decode(ids, skip_special_tokens=False))
        self._begin_text(skip_special=False)
        tops = prompt.prefill_top_logprobs if self._has_top else [None] * len(ids)
        for token, top in zip(prompt.prefill_token_logprobs, tops, strict=True):
            self._add(shown, token, top)
        self._offset = len(echo)
        self._begin_text(self._skip_special)

    def _begin_text(self, skip_special: bool) -> None:
        self._bytes_of = partial(self._tokenizer.token_bytes, skip_special_tokens=skip_special)
        self._detokenizer = IncrementalDetokenizer(self._tokenizer, skip_special)

    def _add(self, shown: dict[str, Any], token: TokenLogprob, top: list[TokenLogprob] | None) -> None:
        logprob, token_id = token
        shown["tokens"].append(self._tokenizer.token_text(token_id))
        shown["token_logprobs"].append(logprob)
        shown["top_logprobs"].append(None if top is None else self._by_text([*top, token]))
        if self._begins_character(token_id):
            self._offset += len(self._detokenizer.flush())
        shown["text_offset"].append(max(self._offset, 0))
        self._offset += len(self._detokenizer.push([token_id]))

    def _begins_character(self, token_id: int) -> bool:
        """Whether the token leaves unfinished what is left of a character before it, which is U+FFFD then."""
        first = self._bytes_of(token_id)[:1]
        return bool(first) and not 0x80 <= first[0] < 0xC0

    def _by_text(self, tokens: list[TokenLogprob]) -> dict[str, float | None]:
        """Log probabilities by text; of several tokens that look the same, the best one's."""
        best: dict[str, float | None] = {}
        for logprob, token_id in tokens:
            best.setdefault(self._tokenizer.token_text(token_id), logprob)
        return best
