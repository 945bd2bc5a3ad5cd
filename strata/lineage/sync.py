"""``strata sync``: carry an uncommitted fix from one stage into every other that had the same lines.

Each changed file is merged three ways: its last committed version is the base, the change is one side, the
other stage's file is the other. Where that conflicts, the stages had already drifted apart there, and nothing
is written at all.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from ..stages import ROOT, TABLE, Stage, existing_stages
from .table import SUPPORT, load_lineage


@dataclass(frozen=True)
class Merge:
    """What one file of another stage becomes; ``is_new`` where that stage had no such file."""

    target: Path
    content: bytes
    is_new: bool


def run_sync(source: Stage | None = None) -> list[Path]:
    """Carry the uncommitted changes of ``source`` (the one changed stage by default) into the other stages.

    Returns the files written. Raises `UserError` where two stages changed, or where a merge conflicts.
    """
    source = source or _changed_stage()
    merges = [
        merge
        for path in _changed_files(source)
        for target in existing_stages()
        if target != source
        for merge in _merge(source, path, target)
    ]
    for merge in merges:
        merge.target.parent.mkdir(parents=True, exist_ok=True)
        merge.target.write_bytes(merge.content)
    return [merge.target for merge in merges]


def counterpart(source: Stage, path: str, target: Stage) -> str:
    """The path in ``target`` of what is ``path`` in ``source``, following renames through the stages between."""
    lineage, order = load_lineage(), [stage.key for stage in TABLE]
    begin, end = order.index(source.key), order.index(target.key)
    for position in range(begin, end, -1):  # towards the past
        path = lineage.ancestor_path(order[position], path)
    for position in range(begin + 1, end + 1):  # towards the present
        renamed = [r.path for r in lineage.files if r.stage == order[position] and r.ancestor == path]
        path = renamed[0] if renamed else path
    return path


def _changed_stage() -> Stage:
    changed = [stage for stage in existing_stages() if _changed_files(stage)]
    if len(changed) != 1:
        names = " and ".join(stage.key for stage in changed) or "no stage"
        raise UserError(f"{names} has uncommitted changes", "Change one stage, then run strata sync [STAGE]")
    return changed[0]


def _changed_files(stage: Stage) -> list[str]:
    """Paths inside the stage that differ from the last commit, untracked ones included."""
    status = _git(
        "status", "--porcelain=v1", "-z", "--untracked-files=all", "--no-renames", "--", str(stage.folder)
    )
    paths = [ROOT / entry[3:] for entry in status.decode().split("\0") if entry]
    return [str(path.relative_to(stage.folder)) for path in paths if path.suffix == ".py"]


def _merge(source: Stage, path: str, target: Stage) -> Iterator[Merge]:
    changed, other = source.folder / path, target.folder / counterpart(source, path, target)
    if not changed.exists():
        raise UserError(f"{changed.relative_to(ROOT)} was removed", "Remove its copies by hand")
    base = _committed(changed)
    if base is None:
        if path.startswith(SUPPORT):  # the same in all stages from its first commit on
            yield Merge(other, changed.read_bytes(), is_new=True)
    elif other.exists() and other.read_bytes() != changed.read_bytes():
        yield Merge(other, _merge_file(other, base, changed), is_new=False)


def _merge_file(ours: Path, base: bytes, theirs: Path) -> bytes:
    with tempfile.NamedTemporaryFile(prefix="strata-sync-") as base_file:
        base_file.write(base)
        base_file.flush()
        command = ["git", "merge-file", "-p", "--quiet", str(ours), base_file.name, str(theirs)]
        merged = subprocess.run(command, capture_output=True, check=False)
    if merged.returncode != 0:
        raise UserError(
            f"{ours.relative_to(ROOT)} has drifted from {theirs.relative_to(ROOT)} where this changes it",
            "Nothing was written: make the change in both by hand",
        )
    return merged.stdout


def _committed(path: Path) -> bytes | None:
    """The file's last committed version; None if it has none."""
    shown = subprocess.run(
        ["git", "-C", str(ROOT), "show", f"HEAD:{path.relative_to(ROOT).as_posix()}"],
        capture_output=True,
        check=False,
    )
    return shown.stdout if shown.returncode == 0 else None


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=True).stdout
