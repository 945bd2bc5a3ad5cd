"""How one request wants its tokens chosen. Decoded from HTTP, then carried to the engine unchanged."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

GREEDY_TEMPERATURE = 1e-6
"""At or below this temperature sampling is greedy: dividing by less would overflow (history's bound)."""

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 512
MAX_LOGIT_BIAS = 1024
MAX_N = 128

Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling parameters with July's names and defaults.

    ``stop`` holds strings that end the text (they are not part of it); ``dtype="int"`` allows digits only and
    stops at a space or newline; ``regex`` is what the whole output has to match (`constrained/dialect.py`), which
    also ends it, whatever ``ignore_eos`` says; ``logit_bias`` adds to the logits of the token ids named by its keys.
    A request with ``seed`` draws the same tokens whatever shares its batch. ``n`` is how many answers a prompt gets;
    main makes requests of one answer of it, the engine sees no other.
    """

    max_new_tokens: int = 16
    stop: str | list[str] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    dtype: Literal["int"] | None = None
    regex: str | None = None
    logit_bias: dict[int, float] | None = None
    seed: Seed | None = None
    n: int = 1

    @property
    def is_greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def stop_strs(self) -> list[str]:
        """Every string that ends the text, those that ``dtype`` implies included."""
        if self.stop is None:
            stops = []
        elif isinstance(self.stop, str):
            stops = [self.stop]
        else:
            stops = self.stop
        return [*stops, " ", "\n"] if self.dtype == "int" else stops

    def verify(self, vocab_size: int) -> None:
        """Raise ``ValueError`` with the field's name and its limits for the first value out of range."""
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {self.max_new_tokens}.")
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature}.")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}.")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k must be -1 (off) or at least 1, got {self.top_k}.")
        if not 1 <= self.n <= MAX_N:
            raise ValueError(f"n must be in [1, {MAX_N}], got {self.n}.")
        if self.regex is not None and self.dtype is not None:
            raise ValueError('regex and dtype exclude each other: dtype "int" is a constraint of its own.')
        self._verify_stops()
        self._verify_logit_bias(vocab_size)

    def _verify_stops(self) -> None:
        if len(self.stop_strs) > MAX_STOP_STRINGS:
            raise ValueError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop_strs)}.")
        for stop in self.stop_strs:
            if not 0 < len(stop) <= MAX_STOP_LENGTH:
                raise ValueError(
                    f"stop strings must have 1 to {MAX_STOP_LENGTH} characters, got {len(stop)}."
                )

    def _verify_logit_bias(self, vocab_size: int) -> None:
        bias = self.logit_bias or {}
        if len(bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens, got {len(bias)}.")
        for token_id, value in bias.items():
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"logit_bias names token id {token_id}; ids go from 0 to {vocab_size - 1}.")
            if not -100.0 <= value <= 100.0:
                raise ValueError(f"logit_bias values must be in [-100, 100], got {value}.")
