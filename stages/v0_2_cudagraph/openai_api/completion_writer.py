"""A completion's choices, written piece by piece: echoed prompt, text, log probabilities. Main only.

One writer for each choice, as long as its request; where nothing is streamed it writes once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..hf_transformers_utils import Tokenizer
from ..managers.call import Call, ReqState
from .logprobs import CompletionLogprobs
from .protocol import CompletionRequest, completion_choice


@dataclass
class CompletionWriter:
    """What one choice has shown: ``num_sent`` characters of ``echo`` and text, and, if asked for, its tokens."""

    echo: str
    logprobs: CompletionLogprobs | None
    num_sent: int = 0

    def write(self, state: ReqState) -> dict[str, Any]:
        """The choice with what is new since the last call."""
        text = self.echo + state.text
        piece, self.num_sent = text[self.num_sent :], len(text)
        return completion_choice(state, piece, None if self.logprobs is None else self.logprobs.take(state))


def completion_writers(body: CompletionRequest, call: Call, tokenizer: Tokenizer) -> list[CompletionWriter]:
    """A writer for each of the call's states. A prompt of token ids is echoed with its special tokens."""
    echoes: list[str | None] = [None] * len(body.prompts)
    if body.echo:
        echoes = [
            prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)
            for prompt in body.prompts
        ]
    writers = []
    for state in call.states:
        echo = echoes[state.index // call.n]
        logprobs = None
        if body.logprobs is not None:
            skip_special = body.skip_special_tokens is not False
            logprobs = CompletionLogprobs(tokenizer, echo, bool(body.logprobs), skip_special)
        writers.append(CompletionWriter(echo or "", logprobs))
    return writers
