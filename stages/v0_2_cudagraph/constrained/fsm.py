"""The token-level automaton of one regex: which tokens may come next, and where each leads.

It walks the regex's character automaton over the model's whole vocabulary, one state at a time and only for
states that a request is in: a step costs tens of microseconds, and an automaton costs nothing before its first
step. Lives in `fsm_cache.FSMCache`, in every process that samples; requests refer to it while they run.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .alphabet import Alphabet
from .bounded_cache import BoundedCache
from .regex_index import RegexIndex
from .spelling import Spelling
from .token_trie import TokenTrie

Mask = NDArray[np.bool_]
Bits = NDArray[np.uint8]

MAX_MASKS = 4096
MAX_MASK_BYTES = 4 * 2**20
"""Of the masks that one automaton keeps; a mask of 49,152 tokens takes 6 kB."""


class RegexState(NamedTuple):
    """Where an output stands: a state of the character automaton, and the bytes of a character just begun."""

    node: int
    pending: bytes = b""


DEAD = RegexState(0)
START = RegexState(1)


class RegexFSM:
    """An output that starts in ``start`` and follows `next_state` through allowed tokens matches the regex
    (``re.fullmatch``) exactly when its state is final; from every state but `DEAD` a final one can be reached.
    """

    start = START

    def __init__(self, index: RegexIndex, trie: TokenTrie, spelling: Spelling) -> None:
        self.index = index
        self._trie = trie
        self._alphabet = Alphabet.unpack(index)
        self._width = index.size + 1
        table = np.frombuffer(index.cells, "<u2").reshape(-1, self._width).astype(np.int32)
        self._final = table[:, index.size] != 0
        table[:, index.size] = 0  # from here on the column of characters that belong to no letter
        self._table = table
        self._flat_table = table.ravel()
        self._has_bytes = spelling.by_bytes.contains(self._alphabet.starts)
        self._trie_letters = self._letters_of(trie.characters)
        self._reaches: dict[bytes, Mask] = {}
        self._opener_reaches = [
            np.array([self._reach(head) for head in group.heads]) for group in trie.openers
        ]
        self._bits: BoundedCache[RegexState, Bits] = BoundedCache(MAX_MASKS, MAX_MASK_BYTES)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds now, the masks at their limit."""
        return self.index.nbytes + self._table.nbytes + self._trie_letters.nbytes + MAX_MASK_BYTES

    def is_final(self, state: RegexState) -> bool:
        """Does the output so far match the regex?"""
        return not state.pending and bool(self._final[state.node])

    def next_state(self, state: RegexState, token_id: int) -> RegexState:
        """Where ``token_id`` leads; `DEAD` if it is not allowed. The end token stays in a final state."""
        if token_id in self._trie.eos_token_ids:
            return state if self.is_final(state) else DEAD
        token = self._trie.tokens[token_id]
        text, rest = _split_text(state.pending + token)
        if not token or text is None:
            return DEAD
        node = self._walk(state.node, text)
        if node and rest and not (self._reach(rest) & (self._table[node] != 0)).any():
            return DEAD
        return RegexState(node, rest) if node else DEAD

    def allowed_token_ids(self, state: RegexState) -> NDArray[np.int64]:
        """Ids of the tokens that may come next, in order; among them the end tokens exactly in final states."""
        return np.flatnonzero(np.unpackbits(self.allowed_bits(state), count=self._trie.vocab_size))

    def allowed_bits(self, state: RegexState) -> Bits:
        """The same as a bit per token, highest bit first: uint8 ``[ceil(vocab_size / 8)]``, not to be changed."""
        bits = self._bits.get(state)
        if bits is None:
            bits = np.packbits(self._compute_mask(state))
            bits.flags.writeable = False
            self._bits.put(state, bits, bits.nbytes)
        return bits

    def _compute_mask(self, state: RegexState) -> Mask:
        mask = np.zeros(self._trie.vocab_size, np.bool_)
        if state.pending:
            mask[[i for i in self._trie.continuers if self.next_state(state, i) != DEAD]] = True
            return mask
        self._allow_texts(state.node, mask)
        self._allow_openers(state.node, mask)
        mask[self._trie.eos_token_ids] = self._final[state.node]
        return mask

    def _allow_texts(self, node: int, mask: Mask) -> None:
        """Walk the trie of whole-character tokens, a level at a time; dead branches stay dead."""
        nodes = np.array([node], np.int32)
        for level in self._trie.levels:
            letters = self._trie_letters.take(level.chars)
            nodes = self._flat_table.take(nodes.take(level.parents) * self._width + letters)
            if not nodes.any():
                return
            mask[level.end_tokens[nodes.take(level.end_nodes) != 0]] = True

    def _allow_openers(self, node: int, mask: Mask) -> None:
        """A token that begins a character is allowed if a letter that can follow has such a character."""
        for group, reaches in zip(self._trie.openers, self._opener_reaches, strict=True):
            after = self._walk(node, group.text)
            mask[group.token_ids] = (reaches & (self._table[after] != 0)).any(axis=1)

    def _walk(self, node: int, text: str) -> int:
        """The state after ``text``; the dead state 0 is kept by every letter."""
        if text:
            points = np.frombuffer(text.encode("utf-32-le"), "<i4")
            for letter in self._letters_of(points).tolist():
                node = int(self._table[node, letter])
        return node

    def _letters_of(self, points: NDArray[np.int32]) -> NDArray[np.int32]:
        intervals = np.searchsorted(self._alphabet.starts, points, side="right") - 1
        return self._alphabet.letters[intervals].astype(np.int32)

    def _reach(self, head: bytes) -> Mask:
        """Bool ``[width]``: the letters that have a character beginning with the bytes ``head``."""
        known = self._reaches.get(head)
        if known is None:
            first, end = _code_points_under(head)
            starts = self._alphabet.starts
            under = slice(np.searchsorted(starts, first, side="right") - 1, np.searchsorted(starts, end))
            known = self._reaches[head] = np.zeros(self._width, np.bool_)
            known[self._alphabet.letters[under][self._has_bytes[under]]] = True
            known[self._width - 1] = False
        return known


def _split_text(data: bytes) -> tuple[str | None, bytes]:
    """The whole characters of ``data`` and the bytes of a character that it ends in; None if it is no UTF-8."""
    try:
        return data.decode(), b""
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            return None, b""
        return data[: error.start].decode(), data[error.start :]


def _code_points_under(head: bytes) -> tuple[int, int]:
    """The half-open range of code points whose UTF-8 form begins with ``head`` (a lead byte and perhaps more)."""
    length, shortest = (2, 0x80) if head[0] < 0xE0 else (3, 0x800) if head[0] < 0xF0 else (4, 0x10000)
    prefix = head[0] & 0x7F >> length
    for byte in head[1:]:
        prefix = prefix << 6 | byte & 0x3F
    shift = 6 * (length - len(head))
    return max(prefix << shift, shortest), (prefix + 1) << shift
