"""What a regex leaves no choice about: the text that every match goes on with from a state.

Behind ``\\{"name": "`` a token need not be generated to be known. A character is forced where it alone may follow
and the text may not end: then it comes next whatever the model prefers, so that many of them can be appended at
once and computed by one prefill (`managers/controller/retokenize.py`). A class is no forced character even if it
has two members only, and an end that is possible is a choice as well: else ``(ab)*`` would go on for ever (#1084).

A `JumpForwardMap` lives in `JumpForwardCache`, in every process that samples, beside the automaton it reads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .alphabet import Alphabet
from .bounded_cache import BoundedCache
from .char_sets import CODE_POINTS
from .fsm import RegexState
from .regex_index import RegexIndex

MAX_FORCED_CHARS = 1024
"""Of one path; the next jump goes on from there. Every state of a compiled regex reaches an end, so its paths are
no circles; whatever table comes, a path has this length at most."""

MAX_PATHS = 4096
MAX_PATH_BYTES = 2**20
"""Of the paths that one map keeps, four bytes a character."""

MAX_MAPS = 64
MAX_BYTES = 128 * 2**20

NOT_FORCED = -1


class ForcedPath(NamedTuple):
    """The text that comes next, empty where there is a choice, and the state behind it."""

    text: str
    state: RegexState


class JumpForwardMap:
    """Forced paths over the table that ``index`` holds; ``[states]`` arrays say where each state's only way leads."""

    def __init__(self, index: RegexIndex) -> None:
        cells = np.frombuffer(index.cells, "<u2").reshape(-1, index.size + 1)
        # An end is in the last column, which no lone character stands for: surrogates, for one, have no letter.
        has_one_way = np.count_nonzero(cells, axis=1) == 1
        letters = cells.argmax(axis=1)
        self._chars = np.where(has_one_way, _lone_characters(Alphabet.unpack(index))[letters], NOT_FORCED)
        self._nodes = cells.max(axis=1)
        self._paths: BoundedCache[int, ForcedPath] = BoundedCache(MAX_PATHS, MAX_PATH_BYTES)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds now, the paths at their limit."""
        return self._chars.nbytes + self._nodes.nbytes + MAX_PATH_BYTES

    def forced_path(self, state: RegexState) -> ForcedPath:
        """The text forced behind the whole characters that led to ``state``.

        Bytes of a character just begun are part of the path's first character, if it is forced at all: what may
        finish them otherwise is a choice between characters, and waits until it is made.
        """
        path = self._paths.get(state.node)
        if path is None:
            path = self._walk(state.node)
            self._paths.put(state.node, path, 4 * len(path.text))
        return path

    def _walk(self, node: int) -> ForcedPath:
        chars: list[str] = []
        while len(chars) < MAX_FORCED_CHARS and (char := int(self._chars[node])) != NOT_FORCED:
            chars.append(chr(char))
            node = int(self._nodes[node])
        return ForcedPath("".join(chars), RegexState(node))


class JumpForwardCache:
    """The maps of the regexes in use, one per pattern, bounded in entries and bytes."""

    def __init__(self) -> None:
        self._maps: BoundedCache[str, JumpForwardMap] = BoundedCache(MAX_MAPS, MAX_BYTES)

    def get(self, pattern: str, index: RegexIndex) -> JumpForwardMap:
        """The map of ``pattern``, made from ``index``."""
        jump_map = self._maps.get(pattern)
        if jump_map is None:
            jump_map = JumpForwardMap(index)
            self._maps.put(pattern, jump_map, jump_map.nbytes)
        return jump_map


def _lone_characters(alphabet: Alphabet) -> NDArray[np.int32]:
    """The only character of each letter, or ``NOT_FORCED``: int32 ``[size + 1]``, the last for those of no letter."""
    lengths = np.diff(alphabet.starts, append=CODE_POINTS)
    sizes = np.bincount(alphabet.letters, lengths, minlength=alphabet.size + 1)
    is_lone = sizes[alphabet.letters] == 1
    lone = np.full(alphabet.size + 1, NOT_FORCED, np.int32)
    lone[alphabet.letters[is_lone]] = alphabet.starts[is_lone]
    return lone
