"""Which file of one stage became which of a later one. Pure functions over the stages' folders and the lineage."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from ..lineage.compare import python_files
from ..lineage.sync import counterpart
from ..stages import Stage

Fate = Literal["added", "removed", "split", "renamed", "changed", "unchanged"]
FATES: tuple[Fate, ...] = ("added", "removed", "split", "renamed", "changed", "unchanged")


@dataclass(frozen=True)
class FilePair:
    """One file's way from ``older`` to ``newer`` (paths inside the stages; None where it did not exist).

    ``split`` is a new file whose code was in an older one that lives on; ``renamed`` may have changed, too.
    """

    older: str | None
    newer: str | None
    fate: Fate
    lines_added: int
    lines_removed: int

    @property
    def path(self) -> str:
        """Where it is now, or was last."""
        return self.newer or self.older or ""


def pair_files(older: Stage, newer: Stage) -> list[FilePair]:
    """Every file of both stages in one pair at least, by path; an older file may be the origin of several."""
    old_files = set(python_files(older))
    origin = {path: counterpart(newer, path, older) for path in python_files(newer)}
    continued = {old for new, old in origin.items() if old in old_files}
    heirs: dict[str, list[str]] = {
        old: [new for new, was in origin.items() if was == old] for old in continued
    }
    pairs = [_pair(older, newer, new, old, heirs.get(old, [])) for new, old in origin.items()]
    pairs += [_removed(older, old) for old in old_files - continued]
    return sorted(pairs, key=lambda pair: pair.path)


def _pair(older: Stage, newer: Stage, new: str, old: str, heirs: list[str]) -> FilePair:
    new_lines = read_lines(newer, new)
    if not heirs:
        return FilePair(None, new, "added", len(new_lines), 0)
    if len(heirs) > 1 and new != _main_heir(old, heirs):
        return FilePair(old, new, "split", len(new_lines), 0)
    added, removed = count_changes(read_lines(older, old), new_lines)
    fate: Fate = "renamed" if new != old else "changed" if added or removed else "unchanged"
    return FilePair(old, new, fate, added, removed)


def _main_heir(old: str, heirs: list[str]) -> str:
    """Of the files that continue ``old``, the one that counts as it: same path, else same name, else the first."""
    name = old.rpartition("/")[2]
    return min(heirs, key=lambda new: (new != old, new.rpartition("/")[2] != name, new))


def _removed(older: Stage, old: str) -> FilePair:
    return FilePair(old, None, "removed", 0, len(read_lines(older, old)))


def read_lines(stage: Stage, path: str) -> list[str]:
    return (stage.folder / path).read_text(encoding="utf-8").splitlines()


def count_changes(old: list[str], new: list[str]) -> tuple[int, int]:
    """How many lines a diff adds and removes."""
    added = removed = 0
    for tag, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            removed, added = removed + j - i, added + m - k
    return added, removed
