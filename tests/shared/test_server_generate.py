"""`/generate` and the information routes of a real server."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from strata.adapters import DIALECTS, ServerDriver

from .driving import prompt
from .fixtures import ServerFactory, model_folder
from .reference import reference
from .speaking import generate, internal_state, is_error, stream, wait_idle

GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 20}


@pytest.fixture
def server(servers: ServerFactory, stage: str) -> ServerDriver:
    return servers(stage)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(model_folder("llama") / "tokenizer.json"))


def test_text(server: ServerDriver, tokenizer: Tokenizer) -> None:
    """The text is what the tokens decode to, and the tokens are the reference's."""
    oracle, text = reference(model_folder("llama")), "The quick brown fox jumps over"
    answer = generate(server, text=text, sampling_params={**GREEDY, "skip_special_tokens": False})
    ids, output = tokenizer.encode(text).ids, list[int]()
    for _ in range(20):
        output.append(int(oracle.logits([*ids, *output], last=1)[0].argmax()))
    assert answer["text"] == tokenizer.decode(output, skip_special_tokens=False)
    meta = answer["meta_info"]
    assert meta["prompt_tokens"] == len(ids)
    assert meta["completion_tokens"] == 20
    assert meta["finish_reason"] == {"type": "length", "length": 20}
    assert 0 <= meta["cached_tokens"] < len(ids)
    assert isinstance(meta["id"], str)


def test_ids_and_text_are_one(server: ServerDriver, tokenizer: Tokenizer) -> None:
    text = "There once was a ship"
    by_text = generate(server, text=text, sampling_params=GREEDY)
    by_ids = generate(server, input_ids=tokenizer.encode(text).ids, sampling_params=GREEDY)
    assert by_text["text"] == by_ids["text"]


def test_a_list_is_answered_in_order(server: ServerDriver) -> None:
    prompts = [prompt(length, seed=40) for length in (3, 50, 1, 20, 7)]
    limits = [9, 3, 1, 16, 0]
    params = [{**GREEDY, "max_new_tokens": limit} for limit in limits]
    answers = generate(server, input_ids=prompts, sampling_params=params)
    assert [a["meta_info"]["completion_tokens"] for a in answers] == limits
    assert [a["meta_info"]["prompt_tokens"] for a in answers] == [3, 50, 1, 20, 7]
    assert len({a["meta_info"]["id"] for a in answers}) == 5
    for ids, param, answer in zip(prompts, params, answers, strict=True):
        assert generate(server, input_ids=ids, sampling_params=param)["text"] == answer["text"]
    assert generate(server, input_ids=[prompts[0]], sampling_params=GREEDY)[0]["text"]


def test_the_rid_comes_back(server: ServerDriver) -> None:
    answer = generate(server, text="hi", rid="my own id", sampling_params=GREEDY)
    assert answer["meta_info"]["id"] == "my own id"


def test_stream_is_cumulative(server: ServerDriver) -> None:
    body: dict[str, Any] = {"text": "In the beginning", "sampling_params": {**GREEDY, "max_new_tokens": 40}}
    whole = generate(server, **body)
    chunks = stream(server, "/generate", body)
    assert len(chunks) > 5, "a stream comes in pieces"
    for earlier, later in itertools.pairwise(chunks):
        assert later["text"].startswith(earlier["text"]), "INV-TEXT: text was taken back"
        assert earlier["meta_info"]["finish_reason"] is None
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 40}
    assert chunks[-1]["meta_info"]["completion_tokens"] == 40


def test_stop_string(server: ServerDriver) -> None:
    text = generate(server, text="Counting:", sampling_params={**GREEDY, "max_new_tokens": 40})["text"]
    stop = next(text[i : i + 3] for i in range(20, len(text)) if "\ufffd" not in text[i : i + 3])
    params = {**GREEDY, "max_new_tokens": 40, "stop": ["never ever", stop]}
    answer = generate(server, text="Counting:", sampling_params=params)
    assert answer["text"] == text[: text.index(stop)]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_information_routes(server: ServerDriver, stage: str) -> None:
    client = server.client
    assert client.get("/health").status_code == 200
    assert client.get("/health_generate").status_code == 200
    assert Path(client.get("/get_model_info").json()["model_path"]).exists()
    args = client.get("/get_server_args").json()
    assert args["port"] == server.port and "api_key" not in args
    models = client.get("/v1/models").json()
    assert models["object"] == "list" and models["data"][0]["object"] == "model"
    state = internal_state(server)
    wanted = "stage size free evictable protected rows_used rows_size running waiting forward_steps"
    wanted += " decode_steps prefill_tokens cached_tokens generated_tokens retractions graph_replays uptime_s"
    assert set(wanted.split()) <= set(state)
    assert state["stage"] == stage


def test_the_state_counts(server: ServerDriver) -> None:
    """A step is one forward; prompt tokens are either computed or cached; nothing else is counted."""
    wait_idle(server)
    server.client.post("/flush_cache")
    before = internal_state(server)
    for _ in range(2):
        generate(server, input_ids=prompt(30, seed=41), sampling_params={**GREEDY, "max_new_tokens": 6})
    after = internal_state(server)
    gained = {key: after[key] - before[key] for key in ("forward_steps", "decode_steps", "generated_tokens")}
    assert gained == {"forward_steps": 12, "decode_steps": 10, "generated_tokens": 12}
    assert after["prefill_tokens"] - before["prefill_tokens"] == 30 + 1
    assert after["cached_tokens"] - before["cached_tokens"] == 29
    assert after["retractions"] == before["retractions"]


def test_flush_cache(server: ServerDriver) -> None:
    generate(server, text="something to remember", sampling_params=GREEDY)
    assert wait_idle(server)["evictable"] > 0
    assert server.client.post("/flush_cache").status_code == 200
    state = internal_state(server)
    assert (state["evictable"], state["free"]) == (0, state["size"])


def test_flush_cache_is_refused_while_busy(server: ServerDriver) -> None:
    """The answer says why; what runs is not disturbed, and afterwards the cache can be flushed."""
    body = {"text": "count", "stream": True, "sampling_params": {**GREEDY, "max_new_tokens": 1500}}
    with server.client.stream("POST", "/generate", json=body) as response:
        pieces = response.iter_raw()  # kept: httpx hangs up when it is collected
        next(pieces)
        for ask in (server.client.post, server.client.get):
            error = is_error(ask("/flush_cache"))
            assert "waiting or running" in error["message"]
        assert internal_state(server)["running"] == 1
    wait_idle(server)
    assert server.client.post("/flush_cache").status_code == 200


@pytest.mark.slow
def test_a_fresh_server_has_warmed_up(stage: str) -> None:
    """What is made on first use is made before the first client; a pool too small for that serves all the same."""
    with ServerDriver(stage, model_folder("llama"), ["--device", "cpu"]) as server:
        assert internal_state(server)["generated_tokens"] == DIALECTS[stage].warm_up_tokens
        assert "warm-up" not in server.log()
    with ServerDriver(stage, model_folder("llama"), ["--device", "cpu", "--max-total-tokens", "4"]) as server:
        assert generate(server, input_ids=[5], sampling_params={**GREEDY, "max_new_tokens": 1})
        assert ("the warm-up request failed: text has" in server.log()) == bool(
            DIALECTS[stage].warm_up_tokens
        )
