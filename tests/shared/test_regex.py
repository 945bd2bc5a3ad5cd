"""Constrained decoding: outputs match their regex, bad regexes are refused in time, and nobody else notices."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tokenizers import Tokenizer

from strata.adapters import ServerDriver

from .driving import prompt, run
from .fixtures import EngineFactory, ServerFactory, model_folder
from .speaking import generate, is_error, probe, stream

pytestmark = [pytest.mark.needs("regex"), pytest.mark.slow]

REFUSED_WITHIN_S = 10
"""Far more than the second that a compilation has, and far less than the minutes that these would take."""

MATCHED = [
    r"\d{3}-\d{4}",
    r"(\d{1,3}\.){3}\d{1,3}",
    r"[\w.]{1,12}@[\w.]{1,12}\.(com|org)",
    r"(yes|no|maybe so)[.!]?",
    r"a|ab|abc",
    r"(a|ab)(c|bcd)(d??){3}",
    r'\{"name": "[^"\\\n]{1,20}", "age": [1-9]\d?, "tags": \[("[a-z]{1,4}"(, )?){0,3}\]\}',
    r"\w{1,30}",
    r"\W{1,10}",
    r"[^\x00-\x7f]{1,10}",
    r"[😀-🙏]{1,4}",
    r"🤗|👩‍👩‍👧|中文",
    r"[α-ωά-ώ]{1,9}|[\u4e00-\u9fff]{2,5}|[\u0900-\u097f]{1,5}",
    r".{40}",
    r"(.|\n){0,20}",
    r"\s{3}\S{3}",
    r"^anchored$",
    r"\A(?:[A-F0-9]{2}:){5}[A-F0-9]{2}\Z",
    r"(\w{1,8} ){4}\w{1,8}\.",
    r"[-+]?\d{1,5}(\.\d{1,5})?(e[-+]?\d{1,2})?",
    r"<(b|i)>[^<>]{0,20}</(b|i)>",
    r"()",
    r"x{20}",
    r"\N{SNOWMAN}\u2603\x41\t",
]


@pytest.fixture
def server(servers: ServerFactory, stage: str) -> ServerDriver:
    return servers(stage)


def constrained(regex: str, **others: Any) -> dict[str, Any]:
    return {"regex": regex, "temperature": 1.0, "max_new_tokens": 400, **others}


def test_outputs_match(server: ServerDriver) -> None:
    """Every pattern three times, all in one batch, at temperature 1."""
    params = [constrained(regex, seed=seed) for regex in MATCHED for seed in range(3)]
    answers = generate(server, text=["The answer is"] * len(params), sampling_params=params)
    for param, answer in zip(params, answers, strict=True):
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        assert re.fullmatch(param["regex"], answer["text"]), (param["regex"], answer["text"])


def test_outputs_of_a_real_vocabulary_match(servers: ServerFactory, stage: str) -> None:
    params = [constrained(regex, seed=1) for regex in MATCHED]
    answers = generate(servers(stage, "smollm2"), text=["It is"] * len(params), sampling_params=params)
    for param, answer in zip(params, answers, strict=True):
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        assert re.fullmatch(param["regex"], answer["text"]), (param["regex"], answer["text"])


def test_greedy_top_k_top_p_and_bias_stay_inside(server: ServerDriver) -> None:
    every_digit = {str(i): -100.0 for i in range(3, 384)}
    variants: list[dict[str, Any]] = [
        {"temperature": 0},
        {"top_k": 1},
        {"top_k": 3},
        {"top_p": 0.01},
        {"logit_bias": every_digit},
    ]
    params = [constrained(r"\d{5}", **variant) for variant in variants]
    for answer in generate(server, text=["Number"] * len(params), sampling_params=params):
        assert re.fullmatch(r"\d{5}", answer["text"])


def test_free_requests_in_the_batch_are_left_alone(server: ServerDriver) -> None:
    texts = ["The quick brown fox", "In the beginning", "Counting: one two", "There once was"]
    free = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 40}
    alone = [generate(server, text=text, sampling_params=free)["text"] for text in texts]
    mixed_texts = list(itertools.chain.from_iterable((text, "x") for text in texts))
    mixed_params = [free if i % 2 == 0 else constrained(r"[a-z]{30}", seed=i) for i in range(8)]
    answers = generate(server, text=mixed_texts, sampling_params=mixed_params)
    assert [answer["text"] for answer in answers[::2]] == alone
    for answer in answers[1::2]:
        assert re.fullmatch(r"[a-z]{30}", answer["text"])


def test_a_stream_matches_too(server: ServerDriver) -> None:
    """Characters made of several tokens arrive whole (INV-TEXT)."""
    body = {"text": "Smile:", "sampling_params": constrained("[😀-🙏]{8}", seed=5)}
    whole = generate(server, **body)["text"]
    chunks = [chunk["text"] for chunk in stream(server, "/generate", body)]
    assert chunks[-1] == whole and re.fullmatch("[😀-🙏]{8}", whole)
    for earlier, later in itertools.pairwise(chunks):
        assert later.startswith(earlier) and "\ufffd" not in later


def test_openai_routes_take_a_regex(server: ServerDriver) -> None:
    body = {"model": "m", "regex": "(yes|no)", "max_tokens": 30, "temperature": 1.0}
    answer = server.client.post("/v1/completions", json={**body, "prompt": "Well?"}).json()
    assert answer["choices"][0]["text"] in ("yes", "no")
    assert answer["choices"][0]["finish_reason"] == "stop"
    chat = {**body, "messages": [{"role": "user", "content": "Well?"}]}
    answer = server.client.post("/v1/chat/completions", json=chat).json()
    assert answer["choices"][0]["message"]["content"] in ("yes", "no")


def test_length_cuts_what_could_still_have_matched(server: ServerDriver) -> None:
    answer = generate(server, text="x", sampling_params=constrained("[ab]{50}", max_new_tokens=7))
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 7}
    assert re.fullmatch("[ab]{7,49}", answer["text"])


def test_ignore_eos_does_not_undo_the_end(server: ServerDriver) -> None:
    answer = generate(server, text="x", sampling_params=constrained(r"\d{2}", ignore_eos=True))
    assert re.fullmatch(r"\d{2}", answer["text"])
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_special_tokens_do_not_show(server: ServerDriver) -> None:
    answer = generate(server, text="x", sampling_params=constrained("[a-c]{4}", skip_special_tokens=False))
    assert re.fullmatch("[a-c]{4}", answer["text"])


def test_retraction_keeps_the_place_in_the_regex(engines: EngineFactory, stage: str) -> None:
    tokenizer = Tokenizer.from_file(str(model_folder("llama") / "tokenizer.json"))
    engine = engines(stage)
    regexes = [r"(\d{2}-){9}", "[a-f]{25}", "(ab|ba){12}"]
    rids = {
        engine.add(
            prompt(9, seed=i), {"regex": regex, "temperature": 1.0, "seed": i, "max_new_tokens": 60}
        ): regex
        for i, regex in enumerate(regexes)
    }
    answers: dict[str, Any] = {}
    for step in range(24):
        if step % 6 == 5:
            engine.force("retract")
        for event in engine.step():
            answers.setdefault(event.rid, []).extend(event.new_ids)
    for rid, answer in run(engine).items():
        answers.setdefault(rid, []).extend(answer.ids)
    for rid, regex in rids.items():
        assert re.fullmatch(regex, tokenizer.decode(answers[rid]))


BAD = {
    "(": "regex is not valid",
    "a**": "regex is not valid",
    "(?=a)": "lookahead",
    "(?<!a)b": "lookbehind",
    r"(a)\1": "back-reference",
    r"\bword\b": r"\b",
    "(?i)a": "flag",
    "a^": "anchor",
    "(?>a)": "atomic",
    "((a{1,60}){1,60}){1,60}": "at most",
    "a" * 5000: "5000 characters",
    r"[^\w\W]": "class without characters",
}


@pytest.mark.parametrize("regex", BAD, ids=lambda regex: regex[:20])
def test_bad_regexes_are_named(server: ServerDriver, regex: str) -> None:
    started = time.monotonic()
    response = server.client.post("/generate", json={"text": "x", "sampling_params": {"regex": regex}})
    assert time.monotonic() - started < REFUSED_WITHIN_S
    error = is_error(response)
    assert BAD[regex] in error["message"] and "\n" not in error["message"]
    assert error["param"] == "regex"


def test_regex_and_dtype_exclude_each_other(server: ServerDriver) -> None:
    params = {"regex": "a", "dtype": "int"}
    error = is_error(server.client.post("/generate", json={"text": "x", "sampling_params": params}))
    assert "dtype" in error["message"]


def test_a_bad_regex_in_a_list_refuses_the_list(server: ServerDriver) -> None:
    params = [{"regex": "a"}, {"regex": "("}]
    is_error(server.client.post("/generate", json={"text": ["x", "y"], "sampling_params": params}))


@contextmanager
def streaming(server: ServerDriver) -> Iterator[list[float]]:
    """A long stream in the background; the times at which its chunks have arrived, one by one."""
    arrivals: list[float] = []
    stopped = threading.Event()

    def consume() -> None:
        body = {
            "text": "There once was a ship",
            "stream": True,
            "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": 2000},
        }
        while not stopped.is_set():
            with server.client.stream("POST", "/generate", json=body) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        json.loads(line.removeprefix("data: "))
                        arrivals.append(time.monotonic())
                    if stopped.is_set():
                        return

    thread = threading.Thread(target=consume)
    thread.start()
    try:
        while len(arrivals) < 5:
            time.sleep(0.01)
        yield arrivals
    finally:
        stopped.set()
        thread.join()


@pytest.mark.parametrize("explosive", ["(a|b)*a(a|b){25}", "((a{0,50}){0,50}b?){0,3}", r".*x.{24}"])
def test_explosive_regexes_are_refused_while_streams_keep_their_pace(
    server: ServerDriver, explosive: str
) -> None:
    with probe(server), streaming(server) as arrivals:
        started = time.monotonic()
        response = server.client.post(
            "/generate", json={"text": "x", "sampling_params": {"regex": explosive}}
        )
        ended = time.monotonic()
        error = is_error(response)
        assert ended - started < REFUSED_WITHIN_S
        assert "1 s to compile" in error["message"]
        # Whoever compiled it in the server's own loop would let none through meanwhile.
        assert sum(started < at < ended for at in arrivals) > 8
