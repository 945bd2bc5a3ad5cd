"""The process that turns a spelled pattern into an automaton, and may be killed while doing so.

Most patterns take milliseconds; a few describe automata with millions of states. The work is one call into Rust
that nothing can interrupt, so it happens in a process of its own: at low priority, with a limit on its memory,
and with an alarm set before each job whose default action ends the process, whatever its parent does meanwhile.
Started by `compiler.RegexCompiler` as a script; lives from the first regex until it is killed or stdin closes.

A job is four bytes of length and a JSON list ``[pattern, letters, seconds]``; an answer is four bytes of length,
``+`` and a table, or ``-`` and a line of text. An empty answer at first says that the process is ready.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import struct
import sys
from array import array
from collections import deque
from typing import BinaryIO

from outlines_core import Index, Vocabulary

MAX_STATES = 0xFFFF
MAX_CELLS = 2**21
MAX_MEMORY = 384 * 2**20
NICENESS = 15
LENGTH = struct.Struct("<I")

Transitions = dict[int, dict[int, int]]


def build_table(pattern: str, letters: int) -> bytes:
    """The automaton of ``pattern``, a Rust regex in which letter ``i`` is ``chr(i)``, as uint16 cells.

    Rows are states: 0 is the dead one, 1 the start. Columns are the letters, and one more that is not 0 in final
    states. Every state but 0 can reach a final one. Raises ``ValueError`` for a pattern too large or unmatchable.

    The regex ends with a letter of its own. A DFA of the `regex` crate stops at the first alternative that
    matches (``a|ab`` would never accept "ab"); with the end spelled out, no match is earlier than another.
    The letter after that is in the vocabulary, since `Index` refuses states without edges, but leads nowhere.
    The next one begins the text, and no other text contains it: a DFA of that crate is also made to find matches
    that begin later, and wherever ``"(\\\\"|a){0,20}"`` may do so the number of its states would double.
    """
    end, never, begin = letters, letters + 1, letters + 2
    vocabulary = Vocabulary(begin + 1, {chr(letter): [letter] for letter in range(begin + 1)})
    index = Index(rf"\x{{{begin:x}}}(?:{pattern})\x{{{end:x}}}", vocabulary)
    transitions: Transitions = index.get_transitions()
    start = transitions.pop(index.get_initial_state())[begin]
    for edges in transitions.values():
        edges.pop(never, None)
    number = _number_live_states(transitions, start, end)
    if len(number) >= MAX_STATES or len(number) * letters > MAX_CELLS:
        raise ValueError(
            f"regex needs an automaton of {len(number)} states by {letters} letters, which is too large."
        )
    width = letters + 1
    cells = array("H", bytes(2 * width * (len(number) + 1)))
    for state, row in number.items():
        for letter, target in transitions[state].items():
            if letter == end:
                cells[row * width + end] = 1
            elif target in number:
                cells[row * width + letter] = number[target]
    return cells.tobytes()


def _number_live_states(transitions: Transitions, start: int, end: int) -> dict[int, int]:
    """Numbers from 1 on for the states that can reach a final state, in the order of their discovery."""
    sources: dict[int, list[int]] = {}
    for state, edges in transitions.items():
        for target in set(edges.values()):
            sources.setdefault(target, []).append(state)
    live = {state for state, edges in transitions.items() if end in edges}
    queue = deque(live)
    while queue:
        for source in sources.get(queue.popleft(), ()):
            if source not in live:
                live.add(source)
                queue.append(source)
    if start not in live:
        raise ValueError("regex matches no text that the tokens of this model can spell.")
    return {state: row for row, state in enumerate([start, *sorted(live - {start})], 1)}


def serve(jobs: BinaryIO, answers: BinaryIO) -> None:
    """Say that this process is ready, then answer jobs until their stream ends."""
    _send(answers, b"")
    while header := jobs.read(LENGTH.size):
        pattern, letters, seconds = json.loads(jobs.read(*LENGTH.unpack(header)))
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            answer = b"+" + build_table(pattern, letters)
        except ValueError as error:
            answer = b"-" + " ".join(str(error).split()).encode()
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(answers, answer)


def _send(answers: BinaryIO, answer: bytes) -> None:
    answers.write(LENGTH.pack(len(answer)) + answer)
    answers.flush()


def limit_this_process() -> None:
    """Low priority and little memory; deaf to Ctrl-C, which is for the parent; killed by its own alarm."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


if __name__ == "__main__":
    limit_this_process()
    serve(sys.stdin.buffer, sys.stdout.buffer)
