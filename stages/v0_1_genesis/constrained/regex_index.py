"""A compiled regex in the form in which it travels from the main process to the router.

A few kilobytes, whatever the vocabulary: an alphabet, and one row of uint16 per state of the automaton over it.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from .alphabet import Alphabet, spell
from .dialect import parse
from .index_worker import build_table
from .spelling import Spelling


class RegexIndex(msgspec.Struct, frozen=True):
    """``starts`` and ``letters`` are an `Alphabet`'s arrays as bytes; ``cells`` what `build_table` returns."""

    starts: bytes
    letters: bytes
    size: int
    cells: bytes

    @classmethod
    def of(cls, alphabet: Alphabet, cells: bytes) -> RegexIndex:
        return cls(alphabet.starts.tobytes(), alphabet.letters.tobytes(), alphabet.size, cells)

    @property
    def nbytes(self) -> int:
        return len(self.starts) + len(self.letters) + len(self.cells)

    @property
    def alphabet(self) -> Alphabet:
        return Alphabet(np.frombuffer(self.starts, "<i4"), np.frombuffer(self.letters, "<u2"), self.size)

    @property
    def table(self) -> NDArray[np.uint16]:
        """``[states, size + 1]``: where each letter leads, 0 being nowhere; then 1 in final states."""
        return np.frombuffer(self.cells, "<u2").reshape(-1, self.size + 1)


def build_index(pattern: str, spelling: Spelling) -> RegexIndex:
    """Compile in this process, however long it takes: for engines without a server around them.

    Raises ``ValueError`` as `compiler.RegexCompiler.compile` does.
    """
    alphabet, spelled = spell(parse(pattern), spelling)
    return RegexIndex.of(alphabet, build_table(spelled, alphabet.size))
