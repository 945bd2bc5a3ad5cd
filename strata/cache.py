"""Where the companion keeps what is costly to make again: converted models and server logs."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import UserError

WRITABLE = "a folder you can write to"


def cache_folder() -> Path:
    """``$STRATA_CACHE``, else ``$XDG_CACHE_HOME/strata``, else ``~/.cache/strata``; it need not exist yet."""
    try:
        if chosen := os.environ.get("STRATA_CACHE"):
            return Path(chosen).expanduser().absolute()
        base = os.environ.get("XDG_CACHE_HOME")
        # The XDG specification says to ignore a relative path here.
        root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:  # no such user, or no home at all
        raise UserError(f"no cache folder: {error}", f"Set STRATA_CACHE to {WRITABLE}") from error
    return root / "strata"


def make_folder(folder: Path) -> Path:
    """Create ``folder`` and return it, or raise a ``UserError`` that names it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot create {folder} ({error.strerror})", f"Set STRATA_CACHE to {WRITABLE}"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to {folder}", f"Set STRATA_CACHE to {WRITABLE}")
    return folder
