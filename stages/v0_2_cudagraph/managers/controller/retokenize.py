"""Jump-forward: forced text goes behind a request's output, and the whole output is tokenized anew.

Tokens of the joined text are those that the model has seen in training: after ``"na`` the forced ``me": `` must not
begin with a token of its own if ``name`` is one. So tokens that were generated may be replaced, and K and V are
valid only up to the first that was. Owned by the ModelTpServer of each rank; equal on all of them, since a jump
hangs on nothing but the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ...constrained.bounded_cache import BoundedCache
from ...constrained.fsm import RegexState
from ...support.text_stream import IncrementalDetokenizer

if TYPE_CHECKING:
    from ...hf_transformers_utils import Tokenizer
    from .infer_batch import Req

MIN_FORCED_BYTES = 2
"""History's threshold, below which the output is not even tokenized."""

MIN_NEW_TOKENS = 2
"""A jump costs a prefill, which brings one token anyway: with a single one more, nothing would be saved."""

ANCHOR = "\n"
"""Put before a text to learn its tokens in the middle of another."""

MAX_TEXTS = 1024
MAX_TEXT_BYTES = 2**24
TOKEN_BYTES = 8
"""Bounds of the texts whose tokens are kept: how many, their bytes (four a character), and those of a token."""


class Jump(NamedTuple):
    """A forced text, the state behind it, and the whole output with it: its text, its tokens, how many are new."""

    forced_text: str
    state: RegexState
    output_text: str
    output_ids: list[int]
    num_new_tokens: int


class Retokenizer:
    """Finds out who can jump, and where to; changes nothing, so that a jump that is refused leaves no trace.

    Args:
        vocab_size: the width of the model's logits; a tokenizer may have more tokens, which are no input.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        # A request whose jump is refused comes to the same text with each token that it generates instead.
        self._known: BoundedCache[str, tuple[int, ...]] = BoundedCache(MAX_TEXTS, MAX_TEXT_BYTES)

    def find_jump(self, req: Req) -> Jump | None:
        """Where ``req``'s regex leads without a choice; None where it does not, or a jump is not to be taken.

        Not taken is one that would reach ``max_new_tokens`` (which holds the limits of context and pool) or run
        over a stop string: such a request ends inside the forced text, at a token that has to be found one by
        one. Nor one whose text has no tokens that decode to it (it spells a special token, say).
        """
        if not req.may_jump_forward:
            return None
        assert req.jump_forward_map is not None
        forced_text, state = req.jump_forward_map.forced_path(req.regex_fsm_state)
        if len(forced_text.encode()) < MIN_FORCED_BYTES or req.would_stop_in(forced_text):
            return None
        # Bytes of an unfinished character are left out here; the forced text has that character whole.
        text = IncrementalDetokenizer(self.tokenizer).push(req.output_ids) + forced_text
        output_ids = self.tokenize(text)
        if output_ids is None or len(output_ids) >= req.max_new_tokens:
            return None
        num_new_tokens = len(output_ids) - len(req.output_ids)
        if num_new_tokens < MIN_NEW_TOKENS:
            return None
        return Jump(forced_text, state, text, output_ids, num_new_tokens)

    def tokenize(self, text: str) -> list[int] | None:
        """The tokens of ``text`` where it continues another, or None if no tokens decode to it exactly."""
        ids = self._known.get(text)
        if ids is None:
            ids = tuple(self._encode(text))
            self._known.put(text, ids, 4 * len(text) + TOKEN_BYTES * len(ids))
        return list(ids) or None

    def _encode(self, text: str) -> list[int]:
        """The same, with no tokens instead of None."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if not self._spells(ids, text):
            # SentencePiece puts a space before every text; behind an anchor that it merges with nothing it can't.
            anchor = self.tokenizer.encode(ANCHOR, add_special_tokens=False)
            anchored = self.tokenizer.encode(ANCHOR + text, add_special_tokens=False)
            ids = anchored[len(anchor) :]
            if anchored[: len(anchor)] != anchor or not self._spells(ids, text):
                return []
        return ids

    def _spells(self, ids: list[int], text: str) -> bool:
        return self.tokenizer.decode(ids) == text and max(ids) < self.vocab_size
