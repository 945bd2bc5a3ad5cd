"""Starts a stage's own server: here in place of this process, and in `server_process.py` as a child."""

from __future__ import annotations

import os
import sys

from .stages import ROOT, find_stage


def server_command(stage_name: str, flags: list[str]) -> list[str]:
    """The command line that starts a stage's server; the embedded model unless ``flags`` name one.

    Raises ``UserError`` for an unknown stage, or when the embedded model cannot be fetched.
    """
    stage = find_stage(stage_name)
    asks_for_help = bool({"-h", "--help"} & set(flags))
    names_model = any(flag.split("=")[0] == "--model-path" for flag in flags)
    if not (asks_for_help or names_model):
        from .model_zoo import fetch

        flags = ["--model-path", str(fetch()), *flags]
    return [sys.executable, "-m", f"{stage.module}.launch_server", *flags]


def server_environment() -> dict[str, str]:
    """Our environment, with the checkout first on the path, so that any working folder will do."""
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *([path] if path else [])])}


def exec_server(stage_name: str, flags: list[str]) -> None:
    """Become the stage's server. The process keeps its id, so signals reach the server itself."""
    command = server_command(stage_name, flags)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, server_environment())
