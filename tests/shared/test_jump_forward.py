"""Jump-forward: text that a regex leaves no choice about costs no decode steps, and changes nothing else."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer

from strata.adapters import DIALECTS, Engine, Event, ServerDriver
from strata.adapters.invariants import check_all, check_idle

from .driving import greedy, prompt
from .fixtures import EngineFactory, ServerFactory, model_folder
from .reference import TOKEN_TOLERANCE, reference
from .speaking import generate, internal_state, is_error, probe, stream

pytestmark = pytest.mark.needs("jump_forward")

JSON = r'\{"name": "[\w ]{1,9}", "kind": "(fox|dog|ship)", "says": "naïve né 漢字 🎉", "age": [1-9]\d?\}'
PATTERNS = [
    JSON,
    r"né 漢字 🎉 (yes|no), the quick brown fox",
    r"t(here once was a ship|he lazy dog) [a-z]{4}\.",
    r"a{30}|b{40}",
    r"(ab)*",
    r"([a-z]{2}, ){6}end",
    r"(the dog )+",
    r"[\u4e2d\u6587]{2} 中文字符 🤗 [🤗🎉]{2} नमस्ते!",
    r"<\|im_end\|>[ab]<\|im_end\|>",
    r"the end",
    r"<plain é>|x{5}",
]


class Answers:
    """What a client would read of each request, put together from events as the detokenizer does it."""

    def __init__(self, model: str = "llama") -> None:
        self.tokenizer = Tokenizer.from_file(str(model_folder(model) / "tokenizer.json"))
        self.before: dict[str, str] = {}
        """Text of the versions that are over."""
        self.ids: dict[str, list[int]] = {}
        """Ids of the newest version that came as ids."""
        self.last: dict[str, Event] = {}

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            rid = event.rid
            shown = self.text(rid)
            if event.text:
                self.before[rid], self.ids[rid] = shown + event.text, []
            self.ids.setdefault(rid, []).extend(event.new_ids)
            self.last[rid] = event
            assert self.text(rid).startswith(shown), "INV-TEXT: text was taken back"

    def text(self, rid: str) -> str:
        """Whole characters so far."""
        text = self.tokenizer.decode(self.ids.get(rid, []), skip_special_tokens=True).rstrip("\ufffd")
        return self.before.get(rid, "") + text

    def output_ids(self, rid: str) -> list[int]:
        return self.tokenizer.encode(self.before.get(rid, "")).ids + self.ids[rid]

    def num_jumped(self, rid: str) -> int:
        meta = self.last[rid].meta
        return meta["completion_tokens"] - meta["completion_tokens_wo_jump_forward"]


def finish(engine: Engine, answers: Answers | None = None) -> Answers:
    """Step until idle; every invariant is checked after every step."""
    answers = answers or Answers()
    for _ in range(5000):
        answers.add(engine.step())
        state = engine.state()
        check_all(state)
        if not state.running and not state.waiting:
            check_idle(state)
            return answers
    raise AssertionError("still busy")


def small(engines: EngineFactory, stage: str, **server_args: Any) -> Engine:
    """An engine whose snapshots are quick to check."""
    return engines(stage, **{"max_total_tokens": 600, **server_args})


def constrained(regex: str, **others: Any) -> dict[str, Any]:
    return {"regex": regex, "temperature": 0.0, "max_new_tokens": 200, **others}


def ask(engine: Engine, params: Mapping[str, Any], seed: int = 0, *, streaming: bool = False) -> Answers:
    engine.add(prompt(9, seed=seed), params, stream=streaming, rid="alone")
    return finish(engine)


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("regex", PATTERNS)
def test_outputs_match(engines: EngineFactory, stage: str, regex: str, streaming: bool) -> None:
    for seed, temperature in enumerate([0.0, 1.0, 1.0]):
        params = constrained(regex, temperature=temperature, seed=seed)
        answers = ask(small(engines, stage), params, seed, streaming=streaming)
        assert re.fullmatch(regex, answers.text("alone")), answers.text("alone")
        end = answers.last["alone"].finish
        assert end is not None and end["type"] == "stop"
        assert answers.last["alone"].meta["completion_tokens"] == len(answers.output_ids("alone")) + 1


def test_forced_text_takes_no_steps(engines: EngineFactory, stage: str) -> None:
    """The first token is sampled, then one prefill has all the rest; flag or not, the text is the same."""
    literal = "There once was a ship that put to sea; 漢字 🎉"
    jumping, plain = small(engines, stage), small(engines, stage, disable_regex_jump_forward=True)
    steps, sampled = [], []
    for engine in (jumping, plain):
        before = engine.counters["forward_steps"]
        answers = ask(engine, constrained(literal))
        assert answers.text("alone") == literal
        steps.append(engine.counters["forward_steps"] - before)
        sampled.append(answers.last["alone"].meta["completion_tokens_wo_jump_forward"])
    assert steps[0] == sampled[0] == 2
    assert steps[1] == sampled[1] > 15
    assert answers.num_jumped("alone") == 0


def test_a_template_takes_few_steps(engines: EngineFactory, stage: str) -> None:
    jumping, plain = small(engines, stage), small(engines, stage, disable_regex_jump_forward=True)
    answers = ask(jumping, constrained(JSON))
    assert answers.num_jumped("alone") > 30
    assert ask(plain, constrained(JSON)).num_jumped("alone") == 0


@pytest.mark.slow
def test_what_follows_a_jump_is_the_models_choice(engines: EngineFactory, stage: str) -> None:
    """INV-SAME: K and V behind a jump are those of the new tokens, also where old ones were replaced."""
    engine, oracle = small(engines, stage), reference(model_folder("llama"))
    replaced = 0
    for seed in range(12):
        regex = r"\w( quick brown fox|here once|he dog|é 🎉) [ab]{6}"
        engine.add(prompt(9, seed=seed), constrained(regex), stream=True, rid="alone")
        answers, generated = Answers(), []
        while "alone" not in answers.last or answers.last["alone"].finish is None:
            events = engine.step()
            if not answers.before:
                generated += [token_id for event in events if not event.text for token_id in event.new_ids]
            answers.add(events)
        output = answers.output_ids("alone")
        if answers.before:
            replaced += generated != output[: len(generated)]
        assert re.fullmatch(regex, answers.text("alone"))
        vocab = answers.tokenizer.get_vocab_size()
        pieces = [answers.tokenizer.decode([i], skip_special_tokens=True) for i in range(vocab)]
        logits = oracle.logits(prompt(9, seed=seed) + output)
        left = 6
        for place in range(len(answers.tokenizer.encode(answers.text("alone")[:-6]).ids), len(output)):
            allowed = [i for i, piece in enumerate(pieces) if re.fullmatch(f"[ab]{{1,{left}}}", piece)]
            row = logits[9 + place - 1]
            assert row[output[place]] >= row[allowed].max() - TOKEN_TOLERANCE
            left -= len(pieces[output[place]])
    assert replaced > 2


def test_replaced_tokens_leave_no_slots_taken(engines: EngineFactory, stage: str) -> None:
    """While a request waits for its prefill, the tree has its K and V up to the first token that is another now."""
    engine = small(engines, stage)
    replaced = 0
    for seed in range(8):
        engine.flush()
        regex = r"\w(here once was|he quick brown|é 漢字 🎉)\d"
        rid = engine.add(prompt(9, seed=seed), constrained(regex), stream=True)
        answers, generated = Answers(), []
        for _ in range(10):
            events = engine.step()
            generated += [token_id for event in events for token_id in event.new_ids]
            answers.add(events)
            if rid in engine.state().waiting:
                break
        else:
            raise AssertionError("no jump")
        held = len(engine.state().tree_slots) - 9
        finish(engine, answers)
        output = answers.output_ids(rid)
        computed = zip(generated[:-1], output, strict=False)
        assert held == len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], computed)))
        replaced += held < len(generated) - 1
    assert replaced


def test_a_jump_does_not_wait_behind_others(engines: EngineFactory, stage: str) -> None:
    """It was running: first in the queue, and its prefill comes before its neighbour's next decode run."""
    policy = {DIALECTS[stage].policy_field: "fcfs"}
    engine = small(engines, stage, max_running_requests=1, **policy)
    engine.add(prompt(9), constrained("the quick brown fox"), rid="jumps")
    engine.add(prompt(9, seed=1), greedy(3), rid="has not begun")
    assert list(finish(engine).last) == ["jumps", "has not begun"]

    engine = small(engines, stage, **policy)
    engine.set_decode_run(None)
    try:
        engine.add(prompt(9), constrained("the quick brown fox"), rid="jumps")
        engine.add(prompt(9, seed=1), greedy(30), rid="goes on")
        engine.step()
        before = engine.counters["decode_steps"]
        engine.step()
        assert engine.state().waiting == ("jumps",)
        assert engine.counters["decode_steps"] - before == 1
        engine.step()
        assert engine.state().waiting == ()
        finish(engine)
    finally:
        engine.set_decode_run(1)


def test_neighbours_are_left_alone(engines: EngineFactory, stage: str) -> None:
    engine = small(engines, stage)
    free = {f"free{i}": prompt(12 + i, seed=40 + i) for i in range(3)}
    alone = Answers()
    for rid, ids in free.items():
        engine.add(ids, greedy(30), rid=rid)
        finish(engine, alone)
    for rid, ids in free.items():
        engine.add(ids, greedy(30), rid=rid, stream=rid == "free1")
        engine.add(ids, constrained(JSON), rid=f"json of {rid}")
    together = finish(engine)
    assert {rid: together.ids[rid] for rid in free} == {rid: alone.ids[rid] for rid in free}


def workload(size: int) -> dict[str, dict[str, Any]]:
    """Constrained requests of all kinds, by rid."""
    rng = random.Random(size)
    return {
        f"r{i}": constrained(
            rng.choice(PATTERNS),
            temperature=rng.choice([0.0, 1.0]),
            seed=i,
            max_new_tokens=rng.choice([200, 200, 1 + rng.randrange(60)]),
            stop=rng.choice([[], [], ["once"], ["🎉", "zzz"], ['", "k']]),
        )
        for i in range(size)
    }


@pytest.fixture
def expected(engines: EngineFactory, stage: str) -> dict[str, tuple[str, Any]]:
    """Text and end of each of the workload's requests alone."""
    engine, answers = small(engines, stage), Answers()
    for seed, (rid, params) in enumerate(workload(30).items()):
        engine.add(prompt(9, seed=seed), params, rid=rid)
        finish(engine, answers)
    return {rid: (answers.text(rid), event.finish) for rid, event in answers.last.items()}


@pytest.mark.slow
@pytest.mark.needs("retraction")
@pytest.mark.parametrize(
    "server_args",
    [
        {},
        {"debug_retract_every": 1},
        {"debug_retract_every": 4},
        {"max_total_tokens": 230},
        {"max_running_requests": 3},
        {"schedule_conservativeness": 0.1, "max_total_tokens": 300},
    ],
    ids=lambda args: "-".join(f"{name}={value}" for name, value in args.items()) or "plenty",
)
def test_the_schedule_changes_no_text(
    engines: EngineFactory, stage: str, server_args: dict[str, Any], expected: dict[str, tuple[str, Any]]
) -> None:
    """INV-SAME: together, retracted, or short of memory; seeds included."""
    engine = small(engines, stage, **server_args)
    before = engine.counters["retractions"]
    for seed, (rid, params) in enumerate(workload(30).items()):
        engine.add(prompt(9, seed=seed), params, rid=rid, stream=seed % 3 == 0)
    answers = finish(engine)
    assert {rid: (answers.text(rid), event.finish) for rid, event in answers.last.items()} == expected
    if "debug_retract_every" in server_args:
        assert engine.counters["retractions"] > before


@pytest.mark.slow
@pytest.mark.needs("retraction")
def test_random_schedules(engines: EngineFactory, stage: str, expected: dict[str, tuple[str, Any]]) -> None:
    """Requests arrive and are aborted at any time, memory runs out, the tree is flushed."""
    engine = small(engines, stage, max_total_tokens=400)
    for run in range(8):
        rng, answers, aborted = random.Random(run), Answers(), set()
        waiting = list(enumerate(workload(30).items()))
        rng.shuffle(waiting)
        while waiting:
            for _ in range(rng.randrange(3)):
                if waiting:
                    seed, (rid, params) = waiting.pop()
                    engine.add(prompt(9, seed=seed), params, rid=rid, stream=rng.random() < 0.5)
            state = engine.state()
            if rng.random() < 0.3 and (live := sorted({*state.running, *state.waiting})):
                aborted.add(rng.choice(live))
                engine.abort(rng.choice(sorted(aborted)))
            if rng.random() < 0.3:
                engine.force("retract")
            if rng.random() < 0.1:
                engine.flush()
            answers.add(engine.step())
            check_all(engine.state())
        finish(engine, answers)
        for rid, event in answers.last.items():
            assert event.finish is not None
            if event.finish["type"] == "abort":
                assert rid in aborted and expected[rid][0].startswith(answers.text(rid))
            else:
                assert (answers.text(rid), event.finish) == expected[rid]


def test_one_that_waits_for_its_prefill_is_aborted(engines: EngineFactory, stage: str) -> None:
    """Cancelled between the jump and the prefill: what came so far stands, and nothing stays behind."""
    engine = small(engines, stage)
    for streaming in (True, False):
        rid = engine.add(prompt(9), constrained("a{50}b*"), stream=streaming)
        answers, was_running = Answers(), False
        while not (was_running and rid in engine.state().waiting):
            was_running |= rid in engine.state().running
            answers.add(engine.step())
        engine.abort(rid)
        finish(engine, answers)
        end = answers.last[rid].finish
        assert end is not None and end["type"] == "abort"
        assert answers.text(rid) == "a" * 50


def test_a_stream_hears_of_a_jump_at_once(engines: EngineFactory, stage: str) -> None:
    """However long its interval is."""
    engine = small(engines, stage, stream_interval=50)
    rid = engine.add(prompt(9), constrained("[ab] the quick brown fox [ab]{60}"), stream=True)
    events: list[Event] = []
    while len(events) < 2:
        events += engine.step()
    assert [len(event.new_ids) for event in events] == [1, 1]
    assert events[1].text == " the quick brown fox " and events[1].finish is None
    engine.abort(rid)
    finish(engine)


@pytest.mark.needs("sampling.stop_strings")
@pytest.mark.parametrize("stop", ["quick", " fo", "漢", "🎉!", "the quick brown fox jumps", "e"])
def test_stop_strings_in_forced_text(engines: EngineFactory, stage: str, stop: str) -> None:
    """One inside the forced text ends it there, as without jumps; one that never completes takes nothing away."""
    literal = "漢字 🎉 the quick brown fox"
    for seed, regex in enumerate([literal, rf"\w{{1,4}} {literal}", rf"{literal} \w{{4}}"]):
        jumped, plain = (
            ask(engine, constrained(regex, stop=[stop]), seed, streaming=True)
            for engine in (small(engines, stage), small(engines, stage, disable_regex_jump_forward=True))
        )
        text, end = jumped.text("alone"), jumped.last["alone"].finish
        assert end is not None
        if stop in literal:
            assert end == {"type": "stop", "matched": stop}
            # Events have ids, whole tokens: the detokenizer cuts the text.
            assert text[: text.index(stop)] == plain.text("alone")[: plain.text("alone").index(stop)]
        else:
            assert re.fullmatch(regex, text)


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 5, 8, 13, 21, 34])
def test_limits_hold(engines: EngineFactory, stage: str, limit: int) -> None:
    for regex in (r"a{20}", "né 漢字 🎉 the quick brown fox [ab]{9}"):
        answers = ask(small(engines, stage), constrained(regex, max_new_tokens=limit), streaming=True)
        event = answers.last["alone"]
        assert event.meta["completion_tokens"] <= limit
        assert event.meta["completion_tokens_wo_jump_forward"] <= event.meta["completion_tokens"]
        if not re.fullmatch(regex, answers.text("alone")):
            assert event.finish == {"type": "length", "length": limit}
            assert event.meta["completion_tokens"] == limit


def test_the_context_holds(engines: EngineFactory, stage: str) -> None:
    engine = small(engines, stage, context_length=32)
    for count in range(15, 27):
        answers = ask(engine, constrained(f"a{{{count}}}!!!?"))
        assert re.match("a+!*$", answers.text("alone"))
        assert answers.last["alone"].meta["completion_tokens"] <= 32 - 9


@pytest.mark.parametrize("regex", ["(ab)*", "(ab)+", "a*", "(the dog )*", "(漢字)+"])
def test_paths_that_could_go_on_for_ever(engines: EngineFactory, stage: str, regex: str) -> None:
    """#1084: where the text may end, the end is a choice as well. A model that never takes it is cut off."""
    never_ends = {2: -100.0}
    params = constrained(regex, max_new_tokens=33, logit_bias=never_ends)
    answers = ask(small(engines, stage), params)
    assert answers.last["alone"].finish == {"type": "length", "length": 33}
    assert re.fullmatch(regex, ask(small(engines, stage), constrained(regex, temperature=1.0)).text("alone"))


@pytest.mark.needs("cuda_graph")
def test_replayed_decodes_jump_too(engines: EngineFactory, stage: str) -> None:
    """Batches shrink and grow by jumps between replays."""
    engine = small(engines, stage, enable_cpu_graph=True, max_running_requests=8)
    for seed, regex in enumerate(PATTERNS):
        engine.add(prompt(9, seed=seed), constrained(regex, temperature=1.0, seed=seed), rid=regex)
    answers = finish(engine)
    assert all(re.fullmatch(regex, answers.text(regex)) for regex in PATTERNS)
    assert engine.counters["graph_replays"] > 10 and answers.num_jumped(JSON) > 20


def test_a_very_long_literal(engines: EngineFactory, stage: str) -> None:
    """Longer than one jump: it goes on where the first ended."""
    engine = small(engines, stage, max_total_tokens=2500)
    before = engine.counters["forward_steps"]
    answers = ask(engine, constrained("a{1800}b", max_new_tokens=2000))
    assert answers.text("alone") == "a" * 1800 + "b"
    assert engine.counters["forward_steps"] - before < 10


def test_without_a_cache(engines: EngineFactory, stage: str) -> None:
    engine = small(engines, stage, **dict(DIALECTS[stage].no_cache_args))
    for seed, regex in enumerate(PATTERNS):
        engine.add(prompt(9, seed=seed), constrained(regex), rid=regex)
    answers = finish(engine)
    assert all(re.fullmatch(regex, answers.text(regex)) for regex in PATTERNS)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_special_tokens_do_not_show(engines: EngineFactory, stage: str, skip_special_tokens: bool) -> None:
    """The text of a special token in a regex is text: no token of that meaning stands for it."""
    regex = r"[ab]<\|im_end\|> the quick [ab]<\|endoftext\|>[ab]"
    params = constrained(regex, skip_special_tokens=skip_special_tokens)
    answers = ask(small(engines, stage), params, streaming=True)
    assert re.fullmatch(regex, answers.text("alone"))
    assert not {0, 1, 2} & set(answers.output_ids("alone")[-1:])


# -- over HTTP -----------------------------------------------------------------------------------------------


@pytest.fixture
def server(servers: ServerFactory, stage: str) -> ServerDriver:
    return servers(stage)


@pytest.mark.slow
def test_streams_say_what_answers_say(server: ServerDriver) -> None:
    """INV-TEXT: whole characters, nothing taken back, and the same text in the end."""
    with probe(server):
        before = internal_state(server)
        for seed, regex in enumerate(PATTERNS):
            params = constrained(regex, temperature=1.0, seed=seed, stop=["zzz", "dog."])
            body = {"text": "The answer:", "sampling_params": params}
            whole = generate(server, **body)
            chunks = stream(server, "/generate", body)
            assert chunks[-1]["text"] == whole["text"]
            assert re.fullmatch(regex, whole["text"])
            for earlier, later in itertools.pairwise(chunks):
                assert later["text"].startswith(earlier["text"]) and "\ufffd" not in later["text"]
            for name in ("completion_tokens", "completion_tokens_wo_jump_forward", "finish_reason"):
                assert chunks[-1]["meta_info"][name] == whole["meta_info"][name]
        after = internal_state(server)
        assert after["jumps"] > before["jumps"]
        assert after["jumped_tokens"] - before["jumped_tokens"] > 100


def test_stop_strings_cut_forced_text(server: ServerDriver) -> None:
    params = constrained(r"[ab]{2} the quick brown fox jumps", stop=["brown"])
    chunks = stream(server, "/generate", {"text": "x", "sampling_params": params})
    assert re.fullmatch("[ab]{2} the quick ", chunks[-1]["text"])
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "brown"}


def test_openai_routes_jump(server: ServerDriver) -> None:
    body = {"model": "m", "regex": JSON, "max_tokens": 200, "temperature": 0, "prompt": "x"}
    answer = server.client.post("/v1/completions", json=body).json()
    assert re.fullmatch(JSON, answer["choices"][0]["text"])
    assert answer["usage"]["completion_tokens"] > 40
    is_error(server.client.post("/v1/completions", json={**body, "regex": "("}))


@pytest.mark.needs("sampling.n")
def test_every_one_of_n_answers_jumps(server: ServerDriver) -> None:
    params = constrained(JSON, temperature=1.0, n=4, seed=3)
    answers = generate(server, text="x", sampling_params=params)
    assert len({answer["text"] for answer in answers}) > 1
    for answer in answers:
        assert re.fullmatch(JSON, answer["text"])
        meta = answer["meta_info"]
        assert meta["completion_tokens_wo_jump_forward"] < meta["completion_tokens"] - 20


@pytest.mark.slow
@pytest.mark.needs("parallel.tensor")
def test_ranks_jump_together(servers: ServerFactory, stage: str, server: ServerDriver) -> None:
    params = [constrained(regex, temperature=1.0, seed=seed) for seed, regex in enumerate(PATTERNS)]
    body = {"text": ["The answer:"] * len(params), "sampling_params": params}
    texts = [answer["text"] for answer in generate(server, **body)]
    two = servers(stage, "llama", "--tp-size", "2")
    with probe(two):
        assert [answer["text"] for answer in generate(two, **body)] == texts
    assert internal_state(two)["jumps"] > 5


@pytest.mark.slow
def test_the_flag_turns_it_off(servers: ServerFactory, stage: str) -> None:
    server = servers(stage, "llama", "--disable-regex-jump-forward")
    meta = generate(server, text="x", sampling_params=constrained(JSON))["meta_info"]
    assert meta["completion_tokens_wo_jump_forward"] == meta["completion_tokens"] > 40
    assert internal_state(server)["jumps"] == 0
