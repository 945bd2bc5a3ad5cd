"""The bytes behind each token of a vocabulary; read once when a tokenizer loads, kept as long as it lives.

A token's text depends on its neighbours only where a character is spread over several tokens. Its bytes
depend on nothing, so text can be decoded token by token without looking back.
"""

from __future__ import annotations

import re
from typing import Any

from tokenizers import Tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
METASPACE = "▁"
ANCHOR_ID = 0


def byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE spells each byte as one printable character: that character → the byte.

    Printable Latin-1 stands for itself; the other 68 bytes take the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def decoder_types(decoder: dict[str, Any] | None) -> set[str]:
    """Names of the steps in the ``decoder`` section of a tokenizer.json."""
    if decoder is None:
        return set()
    steps = decoder.get("decoders", [decoder])
    return {step["type"] for step in steps}


class TokenBytes:
    """Table from token id to bytes, for byte-level BPE, for SentencePiece exports, and by probing for others.

    A SentencePiece token keeps its leading space, also at the start of an output: output continues a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, decoder: dict[str, Any] | None) -> None:
        self._tokenizer = tokenizer
        kinds = decoder_types(decoder)
        self._alphabet = byte_level_alphabet() if "ByteLevel" in kinds else None
        self._is_sentencepiece = bool(kinds & {"ByteFallback", "Metaspace", "Replace"})
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._cache: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of any id; an id that the tokenizer lacks (a padding row of the embedding) has none."""
        known = self._cache.get(token_id)
        if known is None:
            if not 0 <= token_id < self._size:
                return b""
            known = self._cache[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._alphabet is not None:
            return self._byte_level(token, self._alphabet)
        if self._is_sentencepiece:
            byte = BYTE_TOKEN.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace(METASPACE, " ").encode()
        return self._probe(token_id)

    @staticmethod
    def _byte_level(token: str, alphabet: dict[str, int]) -> bytes:
        try:
            return bytes([alphabet[character] for character in token])
        except KeyError:  # not spelled in the alphabet: the token is plain text
            return token.encode()

    def _probe(self, token_id: int) -> bytes:
        """For any other decoder: what the token adds to the text after another token."""
        before = self._tokenizer.decode([ANCHOR_ID], skip_special_tokens=False)
        after = self._tokenizer.decode([ANCHOR_ID, token_id], skip_special_tokens=False)
        return after.removeprefix(before).encode()
