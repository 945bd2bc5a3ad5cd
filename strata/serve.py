"""Starts a stage's own server: in place of this process (`serve`), or as a child (`chat`, `tour`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UserError
from .stages import ROOT, find_stage

if TYPE_CHECKING:
    from .adapters import ServerDriver


def exec_server(stage_name: str, flags: Sequence[str]) -> None:
    """Become the stage's server, with the embedded model unless ``flags`` name one.

    The process keeps its id, so signals reach the server itself. Raises ``UserError`` for an unknown stage, or
    when the embedded model cannot be fetched.
    """
    stage = find_stage(stage_name)
    asks_for_help = bool({"-h", "--help"} & set(flags))
    if not asks_for_help and all(flag.split("=")[0] != "--model-path" for flag in flags):
        flags = ["--model-path", str(_model_folder(None)), *flags]
    # The checkout comes first on the path, so that any working folder will do.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", f"{stage.module}.launch_server", *flags]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, {**os.environ, "PYTHONPATH": path})


@contextmanager
def running_server(stage_name: str, model_path: str | None = None) -> Iterator[ServerDriver]:
    """A stage's server on a free port, ended with the block. Its output is shown only if it does not start."""
    from .adapters import ServerDriver, ServerError

    stage = find_stage(stage_name)
    driver = ServerDriver(stage.key, _model_folder(model_path), env={"PYTHONPATH": str(ROOT)})
    try:
        driver.start()
    except ServerError as error:
        reason = driver.tail(1) or str(error).splitlines()[0]
        raise UserError(f"stage {stage.key} did not start: {reason}") from error
    try:
        yield driver
    finally:
        driver.stop()


def _model_folder(path: str | None) -> Path:
    if path is not None:
        return Path(path)
    from .model_zoo import fetch

    return fetch()
