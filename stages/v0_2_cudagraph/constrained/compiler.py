"""Compiles clients' regexes without ever making anyone else wait.

The main process reads a pattern itself (milliseconds, `dialect`) and gives the expensive part to a worker process
(`index_worker`). A worker that exceeds its second is gone; the next pattern gets a new one. One `RegexCompiler`
lives in the main process as long as the server, its workers from the first regex on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

from .alphabet import spell
from .bounded_cache import BoundedCache
from .char_sets import CLASS_ESCAPES, python_class
from .dialect import RegexError, parse
from .index_worker import LENGTH
from .regex_index import RegexIndex
from .spelling import Spelling, TokenSource, read_tokens

WORKER = Path(__file__).with_name("index_worker.py")
MAX_WORKERS = 8
MAX_IDLE_WORKERS = 2
COMPILE_SECONDS = 1.0
"""How long a worker may take for one pattern; its own alarm enforces it."""
TOTAL_SECONDS = 1.25
"""A pattern that had to wait for a worker has that much less time in it, so that its answer is not late, …"""
LEAST_SECONDS = 0.3
"""… but always as much as this: a hundred times what usual patterns need."""
WAIT_SECONDS = 5.0
"""How long a pattern waits for a worker."""
GRACE_SECONDS = 0.1
"""How much later than its alarm a worker is killed from here."""
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
        self._ending: set[asyncio.Task[int]] = set()
        self._free_workers = asyncio.Semaphore(MAX_WORKERS)

    async def compile(self, pattern: str) -> RegexIndex:
        """The index of ``pattern``.

        Raises ``ValueError`` with one line for a pattern that is bad, refused or too expensive, within 1.5 s
        unless eight of that kind came before it; and `CompilerBusyError` if there were many more.
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

    async def close(self) -> None:
        """End every worker; what is being compiled is cancelled."""
        building = list(self._building.values())
        for task in building:
            task.cancel()
        await asyncio.gather(*building, return_exceptions=True)
        while self._idle:
            self._end(self._idle.pop())
        await asyncio.gather(*self._ending)

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
        deadline = time.monotonic() + TOTAL_SECONDS
        tree = parse(pattern)
        if self._spelling is None:
            self._spelling = asyncio.create_task(asyncio.to_thread(self._read_vocabulary))
        alphabet, spelled = spell(tree, await asyncio.shield(self._spelling))
        return alphabet.pack(await self._run(spelled, alphabet.size, deadline))

    def _read_vocabulary(self) -> Spelling:
        """A tenth of a second, once, before the first regex; in a thread, so that streams go on."""
        for escape in CLASS_ESCAPES:
            python_class(escape)
        return Spelling.of(read_tokens(self._tokenizer, self._vocab_size))

    async def _run(self, pattern: str, letters: int, deadline: float) -> bytes:
        """The pattern's automaton from the first worker that takes the job."""
        for _ in range(MAX_IDLE_WORKERS):
            with contextlib.suppress(ConnectionError):  # it had died while idle
                return await self._run_in_worker(pattern, letters, deadline)
        return await self._run_in_worker(pattern, letters, deadline)

    async def _run_in_worker(self, pattern: str, letters: int, deadline: float) -> bytes:
        """A worker that does not answer in time is not seen again; ``ConnectionError`` if it was gone before."""
        worker = await self._take_worker()
        seconds = min(COMPILE_SECONDS, max(LEAST_SECONDS, deadline - time.monotonic()))
        try:
            async with asyncio.timeout(seconds + GRACE_SECONDS):
                answer = await worker.ask(json.dumps([pattern, letters, seconds]).encode())
            self._keep(worker)
        except (TimeoutError, asyncio.IncompleteReadError):
            self._end(worker)
            raise RegexError(
                f"regex takes more than {COMPILE_SECONDS:g} s to compile; make its repeats shorter or simpler."
            ) from None
        except (ConnectionError, asyncio.CancelledError):
            self._end(worker)
            raise
        finally:
            self._free_workers.release()
        if answer[:1] == b"-":
            raise RegexError(answer[1:].decode())
        return answer[1:]

    def _keep(self, worker: _Worker) -> None:
        if len(self._idle) < MAX_IDLE_WORKERS:
            self._idle.append(worker)
        else:
            self._end(worker)

    def _end(self, worker: _Worker) -> None:
        """Kill ``worker``, but do not wait: giving back its memory takes a while."""
        task = asyncio.create_task(worker.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _take_worker(self) -> _Worker:
        """An idle worker or a new one; the caller releases ``_free_workers`` when done with it."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._free_workers.acquire()
                try:
                    while self._idle:
                        worker = self._idle.pop()
                        if worker.is_alive:
                            return worker
                    return await _Worker.start()
                except BaseException:
                    self._free_workers.release()
                    raise
        except TimeoutError:
            raise CompilerBusyError("other patterns are being compiled; try again.") from None


class _Worker:
    """One `index_worker` process and its two pipes."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._jobs, self._answers = process.stdin, process.stdout

    @classmethod
    async def start(cls) -> _Worker:
        """Returns when the process is ready for a job."""
        # -P: the script's folder is no place to import from.
        command = (sys.executable, "-P", str(WORKER))
        worker = cls(await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL))
        try:
            await worker._receive()
        except BaseException:
            await worker.end()
            raise
        return worker

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, job: bytes) -> bytes:
        """Raises ``ConnectionError`` if the process has ended before, ``IncompleteReadError`` if it ends now."""
        try:
            self._jobs.write(LENGTH.pack(len(job)) + job)
        except RuntimeError as error:  # uvloop's word for a pipe whose other end is gone
            raise ConnectionResetError(str(error)) from error
        await self._jobs.drain()
        return await self._receive()

    async def _receive(self) -> bytes:
        header = await self._answers.readexactly(LENGTH.size)
        return await self._answers.readexactly(*LENGTH.unpack(header))

    async def end(self) -> int:
        """Kill the process, unless its own alarm did, and wait for its exit code."""
        if not self._answers.at_eof():
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        return await self._process.wait()
