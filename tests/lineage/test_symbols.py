"""Symbols and fingerprints: what counts as a difference between two stages, and what does not."""

from __future__ import annotations

from strata.lineage.symbols import symbols

SOURCE = '''
"""A module."""
import os

LIMIT: int = 3

class Pool:
    """Slots."""

    size = 4

    @property
    def free(self) -> int:
        """How many."""
        return self.size  # all of them

def alloc(n: int = 1) -> int:
    return n
'''


def test_every_named_part_is_a_symbol_with_its_lines() -> None:
    found = symbols(SOURCE)
    assert list(found) == ["LIMIT", "Pool", "Pool.free", "alloc"]
    assert (found["Pool.free"].first_line, found["Pool.free"].last_line) == (12, 15)


def differing(source: str) -> list[str]:
    old, new = symbols(SOURCE), symbols(source)
    return [name for name in old if new[name].fingerprint != old[name].fingerprint]


def test_words_are_no_difference() -> None:
    source = (
        SOURCE.replace("How many.", "Other words.")
        .replace("# all", "# none")
        .replace("import os", "import re")
    )
    assert differing(source) == []


def test_a_value_a_default_and_a_body_are_differences_of_their_own_symbol() -> None:
    assert differing(SOURCE.replace("= 3", "= 4")) == ["LIMIT"]
    assert differing(SOURCE.replace("size = 4", "size = 5")) == ["Pool"]
    assert differing(SOURCE.replace("return self.size", "return self.size - 1")) == ["Pool.free"]
    assert differing(SOURCE.replace("n: int = 1", "n: int = 2")) == ["alloc"]
