"""Compiles clients' regexes without ever making anyone else wait.

The main process reads a pattern itself (milliseconds, `dialect`) and gives the expensive part to a worker process
(`index_worker`). A worker that exceeds its second is gone; the next pattern gets a new one. One `RegexCompiler`
lives in the main process as long as the server, its workers from the first regex on.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

from .alphabet import spell
from .bounded_cache import BoundedCache
from .dialect import RegexError, parse
from .index_worker import LENGTH
from .regex_index import RegexIndex
from .spelling import Spelling, TokenSource, read_tokens

WORKER = Path(__file__).with_name("index_worker.py")
MAX_WORKERS = 2
COMPILE_SECONDS = 1.0
"""How long a worker may take for one pattern; its own alarm enforces it."""
QUEUE_SECONDS = 1.2
"""How long a pattern may take altogether, a free worker's coming included."""
FAILURE_SECONDS = 60.0
"""How long a failure is remembered, so that a client that repeats it costs nothing."""
MAX_CACHED = 256
MAX_CACHED_BYTES = 32 * 2**20


class CompilerBusyError(RuntimeError):
    """Other clients' patterns kept all workers busy; this one was never looked at."""


class RegexCompiler:
    """``await compile(pattern)`` from one event loop; equal patterns share one compilation.

    ``vocab_size`` is the width of the model's logits.
    """

    def __init__(self, tokenizer: TokenSource, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._spelling: asyncio.Task[Spelling] | None = None
        self._indices: BoundedCache[str, RegexIndex] = BoundedCache(MAX_CACHED, MAX_CACHED_BYTES)
        self._failures: BoundedCache[str, tuple[float, str]] = BoundedCache(MAX_CACHED, MAX_CACHED_BYTES)
        self._building: dict[str, asyncio.Task[RegexIndex]] = {}
        self._idle: list[_Worker] = []
        self._free_workers = asyncio.Semaphore(MAX_WORKERS)

    async def compile(self, pattern: str) -> RegexIndex:
        """The index of ``pattern``, within 1.5 s.

        Raises ``ValueError`` with one line for a pattern that is bad, refused or too expensive, and
        `CompilerBusyError` if others kept the workers busy.
        """
        if not self._tokenizer.eos_token_ids:
            raise RegexError("regex needs an end-of-text token, and this model's files name none.")
        index = self._indices.get(pattern)
        if index is not None:
            return index
        failed_at, message = self._failures.get(pattern) or (float("-inf"), "")
        if time.monotonic() - failed_at < FAILURE_SECONDS:
            raise RegexError(message)
        task = self._building.get(pattern)
        if task is None:
            task = self._building[pattern] = asyncio.create_task(self._build(pattern))
            task.add_done_callback(lambda done: self._finish(pattern, done))
        return await asyncio.shield(task)  # a client that leaves does not cancel it for the others

    def close(self) -> None:
        """End every worker at once."""
        for task in self._building.values():
            task.cancel()
        while self._idle:
            self._idle.pop().kill()

    def _finish(self, pattern: str, task: asyncio.Task[RegexIndex]) -> None:
        del self._building[pattern]
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._indices.put(pattern, task.result(), task.result().nbytes)
        elif isinstance(error, ValueError):
            message = str(error)
            self._failures.put(pattern, (time.monotonic(), message), len(pattern) + len(message))

    async def _build(self, pattern: str) -> RegexIndex:
        tree = parse(pattern)
        if self._spelling is None:
            self._spelling = asyncio.create_task(asyncio.to_thread(self._read_vocabulary))
        alphabet, spelled = spell(tree, await asyncio.shield(self._spelling))
        deadline = asyncio.get_running_loop().time() + QUEUE_SECONDS
        try:
            async with asyncio.timeout_at(deadline):
                await self._free_workers.acquire()
        except TimeoutError:
            raise CompilerBusyError("other regexes are being compiled; try again.") from None
        try:
            cells = await self._run([spelled, alphabet.size, COMPILE_SECONDS], deadline)
        finally:
            self._free_workers.release()
        return alphabet.pack(cells)

    def _read_vocabulary(self) -> Spelling:
        """A tenth of a second, once, before the first regex; in a thread, so that streams go on."""
        return Spelling.of(read_tokens(self._tokenizer, self._vocab_size))

    async def _run(self, job: list[str | int | float], deadline: float) -> bytes:
        """Give the job to a worker; one that does not answer in time is not seen again."""
        worker = self._idle.pop() if self._idle else await _Worker.start()
        try:
            async with asyncio.timeout_at(deadline):
                answer = await worker.ask(json.dumps(job).encode())
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            worker.kill()
            raise RegexError(
                f"regex took more than {COMPILE_SECONDS:g} s to compile; make its repeats shorter or simpler."
            ) from None
        except asyncio.CancelledError:
            worker.kill()
            raise
        self._idle.append(worker)
        if answer[:1] == b"-":
            raise RegexError(answer[1:].decode())
        return answer[1:]


class _Worker:
    """One `index_worker` process and its two pipes."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> _Worker:
        # -P: the script's folder is no place to import from.
        command = (sys.executable, "-P", str(WORKER))
        return cls(await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL))

    async def ask(self, job: bytes) -> bytes:
        """Raises ``IncompleteReadError`` or ``ConnectionError`` when the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(LENGTH.pack(len(job)) + job)
        await self._process.stdin.drain()
        header = await self._process.stdout.readexactly(LENGTH.size)
        return await self._process.stdout.readexactly(*LENGTH.unpack(header))

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
