"""The child processes of a server: all start together and all die together (INV-LIVE).

Main owns one `ProcessGroup` for as long as it lives. Children watch their parent, the parent watches its children;
whichever process is killed, nothing is left a few seconds later, and nothing of the socket folder either.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from .logs import configure_logging
from .transport import remove_socket_dir

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 5.0
TERMINATE_TIMEOUT_S = 1.5
MAX_HANDSHAKE_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1
"""Linux's request to be sent a signal when the parent ends."""


class StartError(RuntimeError):
    """A child could not start; the message is one line that says which and why."""


@dataclass
class Child:
    """One process and the pipe on which it says that it is ready."""

    name: str
    process: BaseProcess
    ready: Connection

    @property
    def fate(self) -> str:
        """How a dead child ended, for a log line."""
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"the {self.name} process was killed by {signal.Signals(-code).name}"
        return f"the {self.name} process ended with exit code {code}"


class ProcessGroup:
    """The children of a server, from their start to their end."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self.children: list[Child] = []

    def start(self, name: str, target: str, args: tuple[Any, ...], endpoint: str, log_level: str) -> None:
        """Start a process that calls ``target`` (``"module:function"``) with ``args`` and a ready pipe.

        The module is named, not imported, since main must stay free of what its children load.
        """
        ours, theirs = self._context.Pipe(duplex=False)
        is_grandchild = multiprocessing.parent_process() is not None
        process = self._context.Process(
            target=_run_child,
            args=(name, target, args, theirs, endpoint, log_level, is_grandchild),
            name=name,
        )
        with _interrupts_blocked():
            process.start()
        theirs.close()
        self.children.append(Child(name, process, ours))

    def wait_ready(self) -> dict[str, dict[str, Any]]:
        """Wait for every child's handshake: name → what it says of itself. Raises `StartError`."""
        answers: dict[str, dict[str, Any]] = {}
        started = time.monotonic()
        while waiting := [child for child in self.children if child.name not in answers]:
            signs = [child.ready for child in waiting] + [child.process.sentinel for child in self.children]
            if not wait(signs, PROGRESS_INTERVAL_S):
                names = " and ".join(child.name for child in waiting)
                logger.info("waiting for the %s (%.0f s)", names, time.monotonic() - started)
            for child in waiting:
                if child.ready.poll():
                    answers[child.name] = _handshake(child)
            for child in self.children:
                if child.name in answers and not child.process.is_alive():
                    raise StartError(f"{child.fate} while the others were starting.")
        return answers

    def sentinels(self) -> Iterator[tuple[int, Child]]:
        """File descriptors that become readable when their child dies."""
        return ((child.process.sentinel, child) for child in self.children)

    def is_alive(self) -> bool:
        return all(child.process.is_alive() for child in self.children)

    def stop(self) -> None:
        """End every child, by force if it does not go at once."""
        for child in self.children:
            child.process.terminate()
        deadline = time.monotonic() + TERMINATE_TIMEOUT_S
        for child in self.children:
            child.process.join(max(0.0, deadline - time.monotonic()))
            if child.process.is_alive():
                child.process.kill()
                child.process.join()


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes started inside never see Ctrl-C, which a terminal sends to all: main alone answers it.

    The signal mask is inherited, so that holds from a child's first instruction on; here the signal waits. SIGTERM
    waits as well, lest a start be left half-way; a child takes it again as soon as its own code runs.
    """
    resource_tracker.ensure_running()  # starting it later would lift the mask again
    blocked = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)


def _handshake(child: Child) -> dict[str, Any]:
    """Read one child's answer; it may also have died without one."""
    try:
        answer: dict[str, Any] = msgspec.json.decode(child.ready.recv_bytes(MAX_HANDSHAKE_BYTES))
    except (EOFError, OSError) as error:
        child.process.join(TERMINATE_TIMEOUT_S)
        raise StartError(f"{child.fate} while starting.") from error
    if not answer.get("ok"):
        raise StartError(f"{child.name}: {answer.get('error', 'could not start')}")
    return answer


def _run_child(
    name: str,
    target: str,
    args: tuple[Any, ...],
    ready: Connection,
    endpoint: str,
    log_level: str,
    is_grandchild: bool,
) -> None:
    """Body of every child process; a grandchild is one of a child of main's."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    configure_logging(name, log_level)
    if is_grandchild:
        _be_killed_with_parent()
    die_with_parent(on_death=lambda: _clear_up(endpoint))
    module, function = target.split(":")
    try:
        getattr(importlib.import_module(module), function)(*args, ready)
    except Exception as error:
        # A ValueError is how this code base reports a user's mistake: one line, which main prints. A StartError
        # comes from a grandchild, which has logged what there is to say.
        level = logging.DEBUG if isinstance(error, ValueError | StartError) else logging.ERROR
        logger.log(level, "the %s failed", name, exc_info=True)
        _report_failure(ready, error)
        sys.exit(1)


def _report_failure(ready: Connection, error: Exception) -> None:
    """Tell main, if it still waits for the handshake, why there will be none."""
    reason = " ".join(str(error).split()) or type(error).__name__
    with contextlib.suppress(OSError):  # a closed pipe: the process had started, and main sees it die
        ready.send_bytes(msgspec.json.encode({"ok": False, "error": reason[:2000]}))


def _clear_up(endpoint: str) -> None:
    """Remove the sockets of a server whose main was killed; twice, as a sibling may just be binding its own."""
    for _ in range(2):
        remove_socket_dir(endpoint)
        time.sleep(0.1)


def _be_killed_with_parent() -> None:
    """Have the kernel end this process with its parent, even one that is stopped and could not do so itself.

    For grandchildren of main, which `ProcessGroup.stop` does not reach; main's own children clear up first. Where
    there is no such call, `die_with_parent` does it, except for stopped processes.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_parent(on_death: Callable[[], None] | None = None) -> None:
    """End this process soon after its parent, whatever it is doing then. Call it once, in a child."""
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("die_with_parent is for processes started with multiprocessing")

    def watch(sentinel: int) -> None:
        wait([sentinel])
        if on_death is not None:
            on_death()
        os._exit(1)

    threading.Thread(target=watch, args=(parent.sentinel,), daemon=True, name="parent-watch").start()
