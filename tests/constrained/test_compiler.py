"""The compile workers: bounded in time whatever the pattern, killed and replaced, never in anyone's way."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from stages.v0_1_genesis.constrained import compiler as compiler_module
from stages.v0_1_genesis.constrained.compiler import CompilerBusyError, RegexCompiler
from stages.v0_1_genesis.constrained.dialect import RegexError
from stages.v0_1_genesis.constrained.regex_index import RegexIndex
from stages.v0_1_genesis.support.http_server import loop_factory

from .vocabularies import byte_level, of

EXPLOSIVE = "(a|b)*a(a|b){25}"
"""Its automaton has 2**26 states."""


@asynccontextmanager
async def running(compiler: RegexCompiler | None = None) -> AsyncIterator[RegexCompiler]:
    compiler = compiler or RegexCompiler(byte_level(), len(byte_level().tokens))
    try:
        yield compiler
    finally:
        await compiler.close()


def run(test: Callable[[RegexCompiler], Awaitable[None]]) -> None:
    async def main() -> None:
        async with running() as compiler:
            await test(compiler)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:  # the server's kind of loop
        runner.run(main())


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "index_worker" in " ".join(child.cmdline())]


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern",
    [EXPLOSIVE, "((a{0,50}){0,50}b?){0,3}", ".*a(a|b|c){18}d.*"],
)
def test_explosive_patterns_are_refused_in_time(pattern: str) -> None:
    async def test(compiler: RegexCompiler) -> None:
        await compiler.compile("warm")
        with pytest.raises(RegexError, match="regex takes more than 1 s to compile") as caught:
            await compiler.compile(pattern)
        assert "\n" not in str(caught.value)
        assert await compiler.compile("[a-z]+")  # by a new worker

    run(test)


@pytest.mark.parametrize("pattern", [r'"([^"\\]|\\.){0,100}"', "x(a|b[abx]){100}y"])
def test_patterns_that_could_begin_later_are_not_explosive(pattern: str) -> None:
    """What begins a match may come again inside it, counted: an automaton that looked for matches from there on
    as well would have a state for each set of beginnings."""

    async def test(compiler: RegexCompiler) -> None:
        assert await compiler.compile(pattern)

    run(test)


def test_the_loop_goes_on_meanwhile() -> None:
    async def test(compiler: RegexCompiler) -> None:
        await compiler.compile(r"\w\d\s")
        refused = asyncio.create_task(compiler.compile(EXPLOSIVE))
        turns = 0
        while not refused.done():
            await asyncio.sleep(0.005)
            turns += 1
        assert refused.exception()
        assert turns > 20  # some 200 in a second; a blocked loop would have one or two

    run(test)


def test_a_failure_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(compiler: RegexCompiler) -> None:
        with pytest.raises(RegexError):
            await compiler.compile(EXPLOSIVE)
        with monkeypatch.context() as patch:
            patch.setattr(compiler, "_build", None)  # calling it would be another error
            with pytest.raises(RegexError, match="more than 1 s"):
                await compiler.compile(EXPLOSIVE)

    run(test)


def test_a_remembered_failure_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "FAILURE_SECONDS", 0.0)

    async def test(compiler: RegexCompiler) -> None:
        with pytest.raises(RegexError):
            await compiler.compile("(")
        with pytest.raises(RegexError):
            await compiler.compile("(")

    run(test)


def test_equal_patterns_share_one_compilation() -> None:
    async def test(compiler: RegexCompiler) -> None:
        indices = await asyncio.gather(*(compiler.compile("[ab]{1,9}") for _ in range(20)))
        assert all(index is indices[0] for index in indices)
        assert await compiler.compile("[ab]{1,9}") is indices[0]
        assert len(workers()) == 1

    run(test)


def test_a_client_that_leaves_does_not_cancel_it_for_others() -> None:
    async def test(compiler: RegexCompiler) -> None:
        leaves, stays = (asyncio.create_task(compiler.compile("[ab]{2}")) for _ in range(2))
        await asyncio.sleep(0)
        leaves.cancel()
        assert await stays
        with pytest.raises(asyncio.CancelledError):
            await leaves

    run(test)


def test_a_killed_worker_is_replaced() -> None:
    async def test(compiler: RegexCompiler) -> None:
        await compiler.compile("a")
        [worker] = workers()
        worker.kill()
        while (
            worker.is_running()
        ):  # not worker.wait(): that would take the exit code away from the event loop
            await asyncio.sleep(0.01)
        assert await compiler.compile("b")
        assert [new.pid for new in workers()] != [worker.pid]

    run(test)


@pytest.mark.slow
def test_a_flood_of_bad_patterns_has_answers_and_keeps_no_good_one_out() -> None:
    async def test(compiler: RegexCompiler) -> None:
        await compiler.compile("warm")
        flood = [compiler.compile(f"(a|b)*a(a|b){{{30 + i}}}") for i in range(6)]
        *results, good = await asyncio.gather(*flood, compiler.compile("good"), return_exceptions=True)
        assert {type(result) for result in results} == {RegexError}
        assert isinstance(good, RegexIndex)
        await asyncio.sleep(0.3)
        assert len(workers()) <= compiler_module.MAX_IDLE_WORKERS

    run(test)


@pytest.mark.slow
def test_who_never_gets_a_worker_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_WORKERS", 1)

    async def test(compiler: RegexCompiler) -> None:
        await compiler.compile("warm")
        bad = asyncio.create_task(compiler.compile(EXPLOSIVE))
        await asyncio.sleep(0.1)
        with monkeypatch.context() as patch:
            patch.setattr(compiler_module, "WAIT_SECONDS", 0.2)
            with pytest.raises(CompilerBusyError):
                await compiler.compile("good")
        with pytest.raises(RegexError):
            await bad
        assert await compiler.compile("good"), "being busy is no failure to remember"

    run(test)


@pytest.mark.slow
def test_many_good_patterns_at_once() -> None:
    async def test(compiler: RegexCompiler) -> None:
        indices = await asyncio.gather(*(compiler.compile(f"[a-z]{{{i}}}") for i in range(1, 40)))
        assert len({index.cells for index in indices}) == 39

    run(test)


def test_no_process_before_the_first_regex_and_none_after_the_end() -> None:
    async def test(compiler: RegexCompiler) -> None:
        assert not workers()
        await compiler.compile("a")
        assert len(workers()) == 1

    run(test)
    deadline = time.monotonic() + 5
    while workers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not workers()


def test_a_model_without_an_end_token_takes_no_regex() -> None:
    async def main() -> None:
        vocabulary = of("a")
        vocabulary.eos_token_ids = frozenset()
        async with running(RegexCompiler(vocabulary, 2)) as compiler:
            with pytest.raises(RegexError, match="end-of-text token"):
                await compiler.compile("a")

    asyncio.run(main())


ORPHAN = """
import asyncio, sys
from stages.v0_1_genesis.constrained.compiler import RegexCompiler
from tests.constrained.vocabularies import of
async def main():
    compiler = RegexCompiler(of("a", "b"), 3)
    await compiler.compile("a")
    print(compiler._idle[0]._process.pid, flush=True)
    await (compiler.compile(sys.argv[1]) if len(sys.argv) > 1 else asyncio.sleep(60))
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [[], [EXPLOSIVE]], ids=["idle", "busy"])
def test_a_worker_does_not_outlive_a_killed_parent(pattern: list[str]) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, *pattern],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    time.sleep(0.3)
    assert worker.is_running()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 3
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)
