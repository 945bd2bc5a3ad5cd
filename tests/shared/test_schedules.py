"""Hypothesis makes schedules: arrive, stream, finish, abort, run out of memory, be retracted, flush.

Every invariant that a snapshot shows is checked after every step, and at the end every answer is what the
request would have got alone (INV-SAME), whatever happened around it.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from strata.adapters import DIALECTS, Engine, Snapshot
from strata.adapters.invariants import check_all, check_idle

from .driving import Answer, collect, prompt, run, solo
from .fixtures import EngineFactory, reset

POOL = 120
PROMPTS = [
    *(prompt(length, seed=20) for length in (1, 4, 17, 33)),
    *(prompt(17, seed=20)[:cut] + prompt(tail, seed=21) for cut, tail in ((17, 6), (9, 3), (16, 1))),
    prompt(17, seed=20)[:5],
    prompt(90, seed=22),
]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.0, "logit_bias": {2: 12.0}},
    {"temperature": 0.9, "top_p": 0.8, "seed": 5},
    {"temperature": 1.2, "top_k": 9, "seed": 6},
]


class Schedule(RuleBasedStateMachine):
    """One engine; the class attributes are set per stage."""

    engine: Engine
    alone: dict[tuple[int, int, int], Answer]

    @initialize()
    def begin(self) -> None:
        assert reset(self.engine)
        self.answers: dict[str, Answer] = {}
        self.requests: dict[str, tuple[int, int, int]] = {}
        self.aborted: set[str] = set()
        self.out_of_memory = False
        self.state: Snapshot = self.engine.state()

    @property
    def living(self) -> list[str]:
        return [rid for rid in self.requests if rid not in self.answers or not self.answers[rid].finish]

    @rule(
        prompt=st.integers(0, len(PROMPTS) - 1),
        sampling=st.integers(0, len(SAMPLINGS) - 1),
        limit=st.sampled_from([1, 2, 7, 30]),
        stream=st.booleans(),
    )
    def arrive(self, prompt: int, sampling: int, limit: int, stream: bool) -> None:
        params = {**SAMPLINGS[sampling], "max_new_tokens": limit}
        rid = self.engine.add(PROMPTS[prompt], params, stream=stream)
        self.requests[rid] = (prompt, sampling, limit)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(self.living))
        self.engine.abort(rid)
        self.aborted.add(rid)
        self._step()
        assert rid not in self.state.running and rid not in self.state.waiting, "INV-FREE: abort takes a step"

    @rule()
    def abort_a_stranger(self) -> None:
        self.engine.abort("nobody")

    @precondition(lambda self: len(self.state.running) > 1)
    @rule(what=st.sampled_from(["retract", "oom"]))
    def run_out_of_memory(self, what: Literal["retract", "oom"]) -> None:
        self.engine.force(what)
        self._step()

    @precondition(lambda self: len(self.state.running) == 1)
    @rule()
    def last_one_runs_out_of_memory(self) -> None:
        """Probe B20c: it ends with a message; nothing loops, nothing raises."""
        self.out_of_memory = True
        self.engine.force("oom")
        self._step()

    @rule()
    def flush(self) -> None:
        self.engine.flush()
        self._step()

    @invariant()
    def holds(self) -> None:
        check_all(self.state)

    def _step(self) -> None:
        collect(self.engine.step(), self.answers)
        self.state = self.engine.state()
        check_all(self.state)

    def teardown(self) -> None:
        if not hasattr(self, "requests"):
            return
        run(self.engine, self.answers)
        check_idle(self.engine.state())
        for rid, request in self.requests.items():
            answer = self.answers[rid]
            assert answer.finish is not None
            expected = self._alone(request)
            if answer.finish["type"] == "abort":
                assert rid in self.aborted or self.out_of_memory, answer.finish
                assert expected.ids[: len(answer.ids)] == answer.ids
            else:
                assert (answer.ids, answer.finish) == (expected.ids, expected.finish)

    def _alone(self, request: tuple[int, int, int]) -> Answer:
        """What a (prompt, sampling, limit) answers when nothing else goes on."""
        if request not in self.alone:
            which, sampling, limit = request
            assert reset(self.engine)
            params = {**SAMPLINGS[sampling], "max_new_tokens": limit}
            self.alone[request] = solo(self.engine, PROMPTS[which], params)
        return self.alone[request]


def check_schedules(engine: Engine, examples: int) -> None:
    machine = type("Machine", (Schedule,), {"engine": engine, "alone": {}})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=40))


@pytest.mark.slow
@pytest.mark.needs("retraction")
def test_schedules(engines: EngineFactory, stage: str) -> None:
    check_schedules(engines(stage, max_total_tokens=POOL), examples=10)


@pytest.mark.slow
@pytest.mark.needs("retraction")
@pytest.mark.parametrize("policy", range(4))
def test_schedules_of_every_policy(engines: EngineFactory, stage: str, policy: int) -> None:
    dialect = DIALECTS[stage]
    name = dialect.policies[policy % len(dialect.policies)]
    engine = engines(stage, max_total_tokens=POOL, **{dialect.policy_field: name})
    check_schedules(engine, examples=40)


@pytest.mark.slow
@pytest.mark.needs("retraction")
def test_schedules_without_cache(engines: EngineFactory, stage: str) -> None:
    engine = engines(stage, max_total_tokens=POOL, **dict(DIALECTS[stage].no_cache_args))
    check_schedules(engine, examples=40)


@pytest.mark.slow
@pytest.mark.needs("retraction")
def test_schedules_with_few_running(engines: EngineFactory, stage: str) -> None:
    check_schedules(engines(stage, max_total_tokens=POOL, max_running_requests=2), examples=30)
