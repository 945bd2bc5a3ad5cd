"""From a regex over a million characters to one over a handful of letters.

A pattern can tell apart only the characters that its classes tell apart: to ``\\w+ \\d`` there are digits, other
word characters, spaces and the rest. Those groups become the letters of a small alphabet, the pattern is spelled
in letters, and the automaton compiled from it has as many columns as there are letters. So ``\\w{1,64}`` needs 65
states, where an automaton over bytes needs 300 for each of the 64 and one over tokens has 49,152 columns.

Runs in the main process. An `Alphabet` travels inside the compiled index and lives as long as that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .char_sets import ANY_CHAR, CharSet, Points
from .dialect import Chars, Choice, Node, RegexError, Repeat, Sequence, char_set
from .regex_index import RegexIndex
from .spelling import Spelling

MAX_SETS = 512
"""Different characters and classes that one pattern may name."""

MAX_TOGGLES = 65_536
"""Of all of those together; ``\\w`` has about 1,500."""

MAX_SPELLED = 1_000_000
"""Characters of all classes in the pattern that the compile worker is given."""


@dataclass(frozen=True)
class Alphabet:
    """Which letter each character is: those from ``starts[i]`` to ``starts[i + 1]`` are ``letters[i]``.

    ``starts`` is int32, sorted, from 0 on; ``letters`` uint16 of the same length, where ``size`` (one more than
    the last letter) stands for characters that no output may hold.
    """

    starts: NDArray[np.int32]
    letters: NDArray[np.uint16]
    size: int

    def pack(self, cells: bytes) -> RegexIndex:
        """This alphabet together with the automaton over it."""
        return RegexIndex(self.starts.tobytes(), self.letters.tobytes(), self.size, cells)

    @classmethod
    def unpack(cls, index: RegexIndex) -> Self:
        return cls(np.frombuffer(index.starts, "<i4"), np.frombuffer(index.letters, "<u2"), index.size)


def spell(tree: Node, spelling: Spelling) -> tuple[Alphabet, str]:
    """The alphabet of ``tree``, and the tree as a pattern for a Rust regex in which letter ``i`` is ``chr(i)``.

    Characters that the vocabulary cannot spell belong to no letter, so that the automaton never waits for one.
    The letter ``size + 1``, which no text contains, stands for a set of which nothing is left.
    """
    sets = _char_sets(tree)
    toggles = [chars.toggles for chars in sets.values()]
    starts = np.unique(np.concatenate([np.zeros(1, np.int32), *spelling.borders, *toggles])).astype(np.int32)
    member = _membership(toggles, starts) & spelling.chars.contains(starts)
    groups, group_of = np.unique(np.packbits(member, axis=0), axis=1, return_inverse=True)
    in_some_set = groups.any(axis=0)
    size = int(in_some_set.sum())
    letter_of_group = np.where(in_some_set, np.cumsum(in_some_set) - 1, size)
    alphabet = Alphabet(starts, letter_of_group[group_of.ravel()].astype(np.uint16), size)
    spelled = {chars: _spell_set(alphabet, row) for chars, row in zip(sets, member, strict=True)}
    if sum(len(spelled[chars]) for chars in _find_chars(tree)) > MAX_SPELLED:
        raise _too_entangled()
    return alphabet, _spell_node(tree, spelled)


def _membership(toggles: list[Points], starts: Points) -> NDArray[np.bool_]:
    """Bool ``[sets, intervals]``: is the interval in the set? Every toggle is the start of an interval."""
    flips = np.zeros((len(toggles), len(starts)), np.bool_)
    rows = np.repeat(np.arange(len(toggles)), [len(points) for points in toggles])
    flips[rows, np.searchsorted(starts, np.concatenate([np.zeros(0, np.int32), *toggles]))] = True
    return np.logical_xor.accumulate(flips, axis=1)


def _char_sets(tree: Node) -> dict[Chars, CharSet]:
    """What each different literal and class of ``tree`` stands for; raises before that becomes much work."""
    sets: dict[Chars, CharSet] = dict.fromkeys(_find_chars(tree), ANY_CHAR)
    if len(sets) > MAX_SETS:
        raise RegexError(
            f"regex names {len(sets)} different characters and classes; at most {MAX_SETS} are served."
        )
    toggles = 0
    for chars in sets:
        sets[chars] = char_set(chars)
        toggles += len(sets[chars].toggles)
        if toggles > MAX_TOGGLES:
            raise _too_entangled()
    return sets


def _find_chars(node: Node) -> Iterator[Chars]:
    match node:
        case Chars():
            yield node
        case Repeat(body=body):
            yield from _find_chars(body)
        case Sequence(parts=nodes) | Choice(branches=nodes):
            for child in nodes:
                yield from _find_chars(child)


def _too_entangled() -> RegexError:
    return RegexError("regex is too large: its classes are too many and too entangled.")


def _spell_set(alphabet: Alphabet, member: NDArray[np.bool_]) -> str:
    """A class of the letters whose intervals are members; ``member`` is bool ``[intervals]``."""
    letters = np.unique(alphabet.letters[member]).tolist()
    if not letters:
        return rf"\x{{{alphabet.size + 1:x}}}"
    cuts = [0, *(i for i, (a, b) in enumerate(pairwise(letters), 1) if b != a + 1), len(letters)]
    runs = [(letters[start], letters[end - 1]) for start, end in pairwise(cuts)]
    return "[" + "".join(rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in runs) + "]"


def _spell_node(node: Node, spelled: dict[Chars, str]) -> str:
    match node:
        case Chars():
            return spelled[node]
        case Sequence(parts=parts):
            return "".join(_spell_node(part, spelled) for part in parts)
        case Choice(branches=branches):
            return "(?:" + "|".join(_spell_node(branch, spelled) for branch in branches) + ")"
        case Repeat(body=body, low=low, high=high):
            upper = "" if high is None else str(high)
            return f"(?:{_spell_node(body, spelled)}){{{low},{upper}}}"
