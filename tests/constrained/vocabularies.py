"""Vocabularies for the tests of constrained decoding: as few tokens as show a property."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property

from stages.v0_1_genesis.constrained.fsm import RegexFSM, RegexState
from stages.v0_1_genesis.constrained.fsm_cache import FSMCache
from tests.models.tokenizer import SPECIAL_TOKENS, build_tokenizer

END = 0
"""The end token of every vocabulary here."""


@dataclass
class Vocabulary:
    """A tokenizer as `constrained` sees one; token 0 is the end, a special token."""

    tokens: list[bytes]
    eos_token_ids: frozenset[int] = frozenset({END})

    @property
    def special_token_ids(self) -> frozenset[int]:
        return frozenset({END})

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        if token_id in self.special_token_ids and skip_special_tokens:
            return b""
        return self.tokens[token_id]

    def decode(self, token_ids: Iterable[int]) -> str:
        return b"".join(self.token_bytes(i) for i in token_ids).decode()

    @cached_property
    def cache(self) -> FSMCache:
        return FSMCache(self, len(self.tokens))

    def fsm(self, pattern: str) -> RegexFSM:
        return self.cache.get(pattern)

    def ids(self, *tokens: bytes) -> list[int]:
        return [self.tokens.index(token) for token in tokens]


def of(*tokens: bytes | str) -> Vocabulary:
    return Vocabulary([b"<end>", *(t.encode() if isinstance(t, str) else t for t in tokens)])


ALL_BYTES = [bytes([byte]) for byte in range(256)]


@cache
def byte_level() -> Vocabulary:
    """The tiny models' tokenizer: 256 bytes and 125 merges, some of which are parts of characters."""
    from stages.v0_1_genesis.support.token_bytes import TokenBytes

    tokenizer = build_tokenizer()
    token_bytes = TokenBytes(tokenizer, {"type": "ByteLevel"})
    special = len(SPECIAL_TOKENS)
    return of(*(token_bytes[i] for i in range(special, tokenizer.get_vocab_size())))


def accepts(fsm: RegexFSM, vocabulary: Vocabulary, text: str) -> bool:
    """Whether ``text``, spelled in one-byte tokens, leads to a final state."""
    state: RegexState = fsm.start
    by_byte = {token: i for i, token in enumerate(vocabulary.tokens) if len(token) == 1}
    for byte in text.encode():
        state = fsm.next_state(state, by_byte[bytes([byte])])
    return fsm.is_final(state)
