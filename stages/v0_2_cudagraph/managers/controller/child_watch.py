"""Waiting for the death of a process that its parent can't do without (INV-LIVE). Controller and node processes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import NoReturn

from ...support.processes import ProcessGroup

logger = logging.getLogger(__name__)

VERDICT_S = 1.0
"""Whoever watches a dead rank has noticed within this time, and ends the process that waits."""


def wait_for_death(group: ProcessGroup) -> str:
    """How the first child of ``group`` to die ended."""
    children = dict(group.sentinels())
    child = children[wait(list(children))[0]]  # type: ignore[index]
    child.process.join()  # makes the exit code known
    return child.fate


def end_with(group: ProcessGroup) -> NoReturn:
    """Wait for a child's death, and end this process with it: the body of a thread."""
    logger.error("%s; the server ends", wait_for_death(group))
    group.stop()
    os._exit(1)


@contextmanager
def others_blamed() -> Iterator[None]:
    """Around collectives, which fail when another rank has died: who watches that rank ends this process, and says why.

    Only an error that nobody answers for is this rank's own, and gets its traceback.
    """
    try:
        yield
    except RuntimeError:
        time.sleep(VERDICT_S)
        raise
