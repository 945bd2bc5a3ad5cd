"""The automata of the regexes in use, one per pattern.

Requests with the same pattern share an automaton and the masks it has computed. Lives in every process that
samples, as long as the process; bounded in entries and bytes.
"""

from __future__ import annotations

from .alphabet import spell
from .bounded_cache import BoundedCache
from .dialect import parse
from .fsm import RegexFSM
from .index_worker import build_table
from .regex_index import RegexIndex
from .spelling import Spelling, TokenSource, read_tokens
from .token_trie import TokenTrie

MAX_AUTOMATA = 64
MAX_BYTES = 512 * 2**20


class FSMCache:
    """``vocab_size`` is the width of the model's logits; ids from the tokenizer's size on are never allowed."""

    def __init__(self, tokenizer: TokenSource, vocab_size: int) -> None:
        tokens = read_tokens(tokenizer, vocab_size)
        self._trie = TokenTrie(tokens, tokenizer.eos_token_ids)
        self._spelling = Spelling.of(tokens)
        self._automata: BoundedCache[str, RegexFSM] = BoundedCache(MAX_AUTOMATA, MAX_BYTES)

    def get(self, pattern: str, index: RegexIndex | None = None) -> RegexFSM:
        """The automaton of ``pattern``, made from ``index``.

        Without an index (an engine without a server) it is compiled here and now, however long that takes; it
        may raise ``ValueError``, as `compiler.RegexCompiler.compile` does.
        """
        fsm = self._automata.get(pattern)
        if fsm is None:
            fsm = RegexFSM(index or self._build(pattern), self._trie, self._spelling)
            self._automata.put(pattern, fsm, fsm.nbytes)
        return fsm

    def _build(self, pattern: str) -> RegexIndex:
        alphabet, spelled = spell(parse(pattern), self._spelling)
        return alphabet.pack(build_table(spelled, alphabet.size))
