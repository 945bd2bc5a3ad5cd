"""Which characters the tokens of a vocabulary can spell.

A byte-level vocabulary should have a token for each byte, but trained ones lack a few (SmolLM2's has none for
U+0004); one without byte fallback has only the characters it was trained on. An automaton that waited for such a
character would never get it, so regexes are compiled over the characters in here. Built once by main and engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .char_sets import ANY_CHAR, CODE_POINTS, CharSet, Points


class TokenSource(Protocol):
    """What this package needs of a tokenizer (`hf_transformers_utils.Tokenizer` has it)."""

    eos_token_ids: frozenset[int]

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes: ...


def read_tokens(tokenizer: TokenSource, vocab_size: int) -> list[bytes]:
    """The bytes that each id below ``vocab_size`` adds to a text.

    Empty for special tokens, for ids the tokenizer lacks, and thus for all that a constrained text cannot hold.
    """
    special = tokenizer.special_token_ids | tokenizer.eos_token_ids
    return [b"" if i in special else tokenizer.token_bytes(i) for i in range(vocab_size)]


@dataclass(frozen=True)
class Spelling:
    """``by_bytes``: the characters of which every byte is a token; ``chars``: those, and the one-token ones."""

    chars: CharSet
    by_bytes: CharSet

    @classmethod
    def of(cls, tokens: Sequence[bytes]) -> Spelling:
        has_byte = np.zeros(256, np.bool_)
        has_char = np.zeros(CODE_POINTS, np.bool_)
        for token in tokens:
            if len(token) == 1:
                has_byte[token[0]] = True
            if 0 < len(token) <= 4 and (text := _decode(token)) and len(text) == 1:
                has_char[ord(text)] = True
        by_bytes = CharSet.where(_spelled_by(has_byte)) & ANY_CHAR
        return cls(CharSet.where(has_char) | by_bytes, by_bytes)

    @property
    def borders(self) -> tuple[Points, Points]:
        """The points where one of the two sets begins or ends."""
        return self.chars.toggles, self.by_bytes.toggles


def _decode(token: bytes) -> str | None:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return None


def _spelled_by(has_byte: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """For each code point (bool ``[CODE_POINTS]``): are all bytes of its UTF-8 form there?"""
    points = np.arange(CODE_POINTS, dtype=np.int32)
    tail = has_byte[0x80 | points & 0x3F]
    member = np.empty(CODE_POINTS, np.bool_)
    member[:0x80] = has_byte[:0x80]
    for start, end, lead, shifts in (
        (0x80, 0x800, 0xC0, 6),
        (0x800, 0x10000, 0xE0, 12),
        (0x10000, CODE_POINTS, 0xF0, 18),
    ):
        part = points[start:end]
        here = tail[start:end] & has_byte[lead | part >> shifts]
        for shift in range(6, shifts, 6):
            here &= has_byte[0x80 | part >> shift & 0x3F]
        member[start:end] = here
    return member
