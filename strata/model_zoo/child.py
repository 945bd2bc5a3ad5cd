"""Runs one module in a child process that never outlives its parent.

``python -m strata.model_zoo.child MODULE ARGS…`` runs MODULE as ``__main__``. The parent holds the write end
of our stdin; when it dies, even by SIGKILL, the read below ends and so do we. Without this, an orphaned pip
or conversion would go on writing into a folder that the next fetch is cleaning up.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading


def die_with_parent() -> None:
    """End this process as soon as stdin closes."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="parent-watch").start()


if __name__ == "__main__":
    die_with_parent()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
