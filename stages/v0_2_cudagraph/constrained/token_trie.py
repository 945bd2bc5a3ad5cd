"""A vocabulary arranged so that an automaton can be walked over all its tokens at once.

Most tokens are whole characters; they form a trie over characters, stored level by level. The few others begin
or end inside a character (an emoji is often four tokens of a byte each) and are listed by how they do.
Built once in each process that samples; lives as long as it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

CODE_POINT_BITS = 21


class TrieLevel(NamedTuple):
    """The nodes that are one depth away from the root; all arrays int32."""

    parents: Ints
    """[nodes]: which node of the level above each one hangs from."""
    chars: Ints
    """[nodes]: its character, as an index into `TokenTrie.characters`."""
    end_nodes: Ints
    """[tokens]: the nodes at which a token ends, with …"""
    end_tokens: Ints
    """[tokens]: … that token's id."""


class Openers(NamedTuple):
    """Tokens that are ``text`` followed by the beginning of a character."""

    text: str
    token_ids: Ints
    heads: list[bytes]
    """[tokens]: that beginning."""


class TokenTrie:
    """``tokens[i]`` is the bytes of token ``i``; empty ones (special tokens, padding) are left out."""

    def __init__(self, tokens: Sequence[bytes], eos_token_ids: frozenset[int]) -> None:
        self.tokens = tokens
        self.vocab_size = len(tokens)
        self.eos_token_ids = np.array(sorted(i for i in eos_token_ids if i < len(tokens)), dtype=np.int32)
        texts: dict[int, str] = {}
        heads: defaultdict[str, list[tuple[int, bytes]]] = defaultdict(list)
        self.continuers: list[int] = []
        """Tokens that begin with a continuation byte: they go on with a character begun before."""
        for token_id, token in enumerate(tokens):
            if not token:
                continue
            try:
                texts[token_id] = token.decode()
            except UnicodeDecodeError as error:
                if token[0] & 0xC0 == 0x80:
                    self.continuers.append(token_id)
                elif error.reason == "unexpected end of data":
                    heads[token[: error.start].decode()].append((token_id, token[error.start :]))
                # Else the token is no piece of any text.
        self.openers = [
            Openers(text, np.array([i for i, _ in pairs], np.int32), [head for _, head in pairs])
            for text, pairs in heads.items()
        ]
        self.characters, self.levels = _build_levels(texts)


def _build_levels(texts: dict[int, str]) -> tuple[Ints, list[TrieLevel]]:
    """The distinct characters, int32 ``[characters]``, and the trie of ``texts`` (token id → text) over them."""
    token_ids = np.fromiter(texts, np.int32, len(texts))
    lengths = np.fromiter(map(len, texts.values()), np.int64, len(texts))
    offsets = np.cumsum(lengths) - lengths
    stream = np.frombuffer("".join(texts.values()).encode("utf-32-le"), "<u4")
    characters, chars = np.unique(stream, return_inverse=True)
    levels: list[TrieLevel] = []
    left, nodes = np.arange(len(texts)), np.zeros(len(texts), np.int64)
    while left.size:
        keys = nodes << CODE_POINT_BITS | chars[offsets[left] + len(levels)]
        unique_keys, nodes = np.unique(keys, return_inverse=True)
        ends = lengths[left] == len(levels) + 1
        levels.append(
            TrieLevel(
                (unique_keys >> CODE_POINT_BITS).astype(np.int32),
                (unique_keys & (1 << CODE_POINT_BITS) - 1).astype(np.int32),
                nodes[ends].astype(np.int32),
                token_ids[left[ends]],
            )
        )
        left, nodes = left[~ends], nodes[~ends]
    return characters.astype(np.int32), levels
