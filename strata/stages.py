"""The stages of this book, and which of them exist in this checkout. Knows names only: imports no stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .errors import UserError

ROOT = Path(__file__).resolve().parent.parent
"""The repository: the companion runs from a checkout (an editable install), never from a copied package."""


@dataclass(frozen=True)
class Stage:
    """One engine. ``key`` is what a user types, ``package`` its folder under ``stages/``."""

    key: str
    package: str
    date: str
    summary: str

    @property
    def folder(self) -> Path:
        return ROOT / "stages" / self.package

    @property
    def module(self) -> str:
        return f"stages.{self.package}"

    @property
    def exists(self) -> bool:
        return (self.folder / "launch_server.py").is_file()


TABLE = (
    Stage("v0.1", "v0_1_genesis", "January 2024", "router and model_rpc, refcounted pool, radix cache"),
    Stage("v0.2", "v0_2_cudagraph", "July 2024", "controller, CUDA graphs, adaptive admission, retraction"),
    Stage("v0.3", "v0_3_restructured", "October 2024", "scheduler and workers, attention backends, MLA"),
)


def existing_stages() -> list[Stage]:
    """The stages of this checkout, oldest first."""
    return [stage for stage in TABLE if stage.exists]


def find_stage(name: str) -> Stage:
    """The stage called ``name``: its key, its folder, or ``latest``; a ``UserError`` names the choices."""
    stages = existing_stages()
    choices = ", ".join(stage.key for stage in stages) or "none"
    for stage in TABLE:
        if name in (stage.key, stage.package):
            if stage.exists:
                return stage
            raise UserError(f"stage {name} is not in this checkout", f"Here: {choices}")
    if name == "latest" and stages:
        return stages[-1]
    raise UserError(f"there is no stage {name!r}", f"Choose one of: {choices}")


def in_order(one: Stage, other: Stage) -> tuple[Stage, Stage]:
    """Two different stages, the older first; a ``UserError`` if they are the same."""
    if one == other:
        raise UserError(f"{one.key} is compared with itself", "Name two stages")
    older, newer = sorted((one, other), key=TABLE.index)
    return older, newer
