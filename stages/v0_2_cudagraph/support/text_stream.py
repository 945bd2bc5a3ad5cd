"""From token ids to text that may be shown: whole characters, and nothing that may begin a stop string.

Used by the engine (to learn when a stop string ends a request) and by the detokenizer (to cut the text
there). One object of each class lives as long as its request. Both give the same joined text however their
input is cut into pushes (INV-TEXT).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenBytesSource(Protocol):
    """What this module needs of a tokenizer (`hf_transformers_utils.Tokenizer` has it)."""

    def token_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """UTF-8 bytes, perhaps only a part of a character, that the token adds to a text."""
        ...


class IncrementalDetokenizer:
    """Decodes one request's output as it grows; bytes of an unfinished character wait for the rest.

    Tokens are pieces of bytes, not of characters: an emoji may be four tokens. So each token adds its bytes
    to an incremental UTF-8 decoder, which costs the same for the first token as for the thousandth. Bytes
    that can never become a character turn into U+FFFD at once; they do not hold back what follows.
    """

    def __init__(self, tokenizer: TokenBytesSource, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the whole characters that are new."""
        skip, token_bytes = self._skip_special_tokens, self._tokenizer.token_bytes
        return self._decoder.decode(b"".join([token_bytes(token_id, skip) for token_id in token_ids]))

    def flush(self) -> str:
        """The output has ended: return U+FFFD if it ended inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopStringFilter:
    """Ends a text before the first occurrence of any stop string.

    A suffix that may be the beginning of a stop string is held back until the next characters decide. "First"
    means leftmost, so a shorter match further right waits while a longer one that began before it may still
    complete; of two that begin together the shorter one matches.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(stops, key=len)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text, once one has."""

    def push(self, text: str) -> str:
        """Add text; return what may surely be shown, which is nothing once a stop string has matched."""
        if self.matched is not None or not text:
            return ""
        if not self._stops:
            return text
        self._held += text
        cut, stop = self._first_match()
        pending = self._first_possible_start()
        if stop is not None and cut <= pending:
            self.matched = stop
            return self._release(cut, forget_rest=True)
        return self._release(pending)

    def flush(self) -> str:
        """The output has ended: return what was held back, up to a stop string that was still waiting."""
        cut, stop = self._first_match()
        if self.matched is None:
            self.matched = stop
        return self._release(cut, forget_rest=True)

    def _first_match(self) -> tuple[int, str | None]:
        """Leftmost complete stop string in the held text: where it begins, and which one it is."""
        best, best_stop = len(self._held), None
        for stop in self._stops:
            start = self._held.find(stop, 0, best + len(stop) - 1)
            if start >= 0:
                best, best_stop = start, stop
        return best, best_stop

    def _first_possible_start(self) -> int:
        """Where the longest suffix begins that is a proper beginning of a stop string."""
        held = self._held
        for start in range(max(0, len(held) - self._longest + 1), len(held)):
            suffix = held[start:]
            if any(len(stop) > len(suffix) and stop.startswith(suffix) for stop in self._stops):
                return start
        return len(held)

    def _release(self, end: int, forget_rest: bool = False) -> str:
        shown, self._held = self._held[:end], "" if forget_rest else self._held[end:]
        return shown
