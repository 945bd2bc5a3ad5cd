"""Helpers that drive an `Engine`: prompts, running to the end with every invariant checked on the way."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strata.adapters import Engine, Event
from strata.adapters.invariants import check_all, check_idle

GREEDY: Mapping[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def greedy(max_new_tokens: int, **others: Any) -> dict[str, Any]:
    return {**GREEDY, "max_new_tokens": max_new_tokens, **others}


def prompt(length: int, seed: int = 0, vocab: int = 384) -> list[int]:
    """Random ids, special tokens left out; the same for the same arguments."""
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(3, vocab) for _ in range(length)]


@dataclass
class Answer:
    """All that an engine said of one request."""

    ids: list[int] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def all_ids(self) -> list[int]:
        """With the end-of-sequence token that engines leave out of the output."""
        if self.finish is not None and isinstance(self.finish.get("matched"), int):
            return [*self.ids, self.finish["matched"]]
        return self.ids


def collect(events: Sequence[Event], into: dict[str, Answer] | None = None) -> dict[str, Answer]:
    answers = {} if into is None else into
    for event in events:
        answer = answers.setdefault(event.rid, Answer())
        assert answer.finish is None, f"{event.rid} got output after its end"
        answer.ids += event.new_ids
        answer.finish, answer.meta = event.finish, event.meta
    return answers


def run(
    engine: Engine, answers: dict[str, Answer] | None = None, max_steps: int = 20_000
) -> dict[str, Answer]:
    """Step until idle, adding to ``answers``; all that a snapshot shows is checked after every step."""
    answers = {} if answers is None else answers
    for _ in range(max_steps):
        collect(engine.step(), answers)
        state = engine.state()
        check_all(state)
        if not state.running and not state.waiting:
            check_idle(state)
            return answers
    raise AssertionError(f"still busy after {max_steps} steps")


def solo(engine: Engine, ids: Sequence[int], params: Mapping[str, Any]) -> Answer:
    """The answer to one request alone."""
    rid = engine.add(ids, params)
    return run(engine)[rid]
