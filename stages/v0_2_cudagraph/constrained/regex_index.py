"""A compiled regex in the form in which it travels from the main process to the engine.

A few kilobytes, whatever the vocabulary. `alphabet.Alphabet.pack` makes one, `fsm.RegexFSM` reads it; this module
imports nothing heavy, since every process of the ring knows its messages.
"""

from __future__ import annotations

import msgspec


class RegexIndex(msgspec.Struct, frozen=True):
    """An alphabet and one row per state of the automaton over it, as bytes of little-endian arrays.

    ``starts`` is int32 ``[intervals]``, ``letters`` uint16 ``[intervals]``, ``size`` the number of letters
    (`alphabet.Alphabet`); ``cells`` is uint16 ``[states, size + 1]`` (`index_worker.build_table`).
    """

    starts: bytes
    letters: bytes
    size: int
    cells: bytes

    @property
    def nbytes(self) -> int:
        return len(self.starts) + len(self.letters) + len(self.cells)
