"""The manifest of a converted model: written last, it is what makes a folder count as whole."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from .models import ZooModel

MANIFEST = "strata-manifest.json"
FORMAT = 1
"""Raised when the conversion changes what it writes: older folders are then converted again."""


def write_manifest(folder: Path, model: ZooModel) -> None:
    """Record size and SHA-256 of every file in ``folder``, and flush all of it to the disk."""
    files: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        files[path.name] = {"size": path.stat().st_size, "sha256": _sha256(path)}
        _fsync(path)
    manifest = {"format": FORMAT, "model": model.name, "wheel_sha256": model.sha256, "files": files}
    target = folder / MANIFEST
    target.write_text(json.dumps(manifest, indent=1) + "\n")
    _fsync(target)
    _fsync(folder)


def damage(folder: Path, model: ZooModel, *, hashes: bool = False) -> str | None:
    """Say in a few words why ``folder`` is not the whole converted ``model``; None if it is.

    Sizes only by default, which takes a millisecond; with ``hashes`` every byte is read.
    """
    if not folder.is_dir():
        return "not fetched"
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] != FORMAT or manifest["wheel_sha256"] != model.sha256:
            return "made by another version"
        for name, expected in manifest["files"].items():
            path = folder / name
            if path.stat().st_size != expected["size"]:
                return f"{name} has the wrong size"
            if hashes and _sha256(path) != expected["sha256"]:
                return f"{name} has the wrong content"
    except OSError as error:
        return f"{Path(error.filename or folder).name} is missing or unreadable"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
