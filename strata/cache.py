"""Where the companion keeps what is costly to make again: converted models and server logs."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import UserError


def cache_folder() -> Path:
    """``$STRATA_CACHE``, else ``$XDG_CACHE_HOME/strata``, else ``~/.cache/strata``; it need not exist yet."""
    if chosen := os.environ.get("STRATA_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says to ignore a relative path here.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "strata"


def make_folder(folder: Path) -> Path:
    """Create ``folder`` and return it, or raise a ``UserError`` that names it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot create {folder} ({error.strerror})", "Set STRATA_CACHE to a folder you can write to"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to {folder}", "Set STRATA_CACHE to a folder you can write to")
    return folder
