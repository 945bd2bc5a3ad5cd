"""Bad input: a 4xx with OpenAI's error object that names the field and the limit, and no harm done.

Probes B03, B05, B09 and the kinds they stand for; each case is checked against a canary by the probe rule.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from strata.adapters import DIALECTS, ServerDriver

from .fixtures import ServerFactory
from .speaking import canary, generate, internal_state, is_error, probe

CHAT = [{"role": "user", "content": "hi"}]

GENERATE: list[tuple[dict[str, Any], str]] = [
    ({}, "text"),
    ({"text": ""}, "text"),
    ({"text": []}, "text"),
    ({"text": [""]}, "text"),
    ({"text": None}, "text"),
    ({"text": 3}, "text"),
    ({"text": ["a", 3]}, "text"),
    ({"text": "a", "input_ids": [1]}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[]]}, "input_ids"),
    ({"input_ids": [[1], []]}, "input_ids"),
    ({"input_ids": [1, [2]]}, "input_ids"),
    ({"input_ids": [384]}, "input_ids"),
    ({"input_ids": [200_000]}, "input_ids"),
    ({"input_ids": [-1]}, "input_ids"),
    ({"input_ids": [2**63]}, "input_ids"),
    ({"input_ids": [10**40]}, "input_ids"),
    ({"input_ids": [[1, 2], [999_999_999]]}, "input_ids"),
    ({"input_ids": [1.5]}, "input_ids"),
    ({"input_ids": [True]}, "input_ids"),
    ({"input_ids": ["1"]}, "input_ids"),
    ({"input_ids": [None]}, "input_ids"),
    ({"input_ids": "123"}, "input_ids"),
    ({"text": "a", "stream": "yes"}, "stream"),
    ({"text": "a", "stream": 1}, "stream"),
    ({"text": "a", "rid": 3}, "rid"),
    ({"text": "a", "rid": ""}, "rid"),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
    ({"text": "a", "unknown_field": 1}, "unknown_field"),
    ({"text": "a", "sampling_params": 3}, "sampling_params"),
    ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    ({"text": "a", "image_data": "x"}, "image_data"),
]

SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": -1}, "max_new_tokens"),
    ({"max_new_tokens": 2.5}, "max_new_tokens"),
    ({"max_new_tokens": "4"}, "max_new_tokens"),
    ({"max_new_tokens": None}, "max_new_tokens"),
    ({"max_new_tokens": True}, "max_new_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": -1e-9}, "temperature"),
    ({"temperature": "NaN"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.0001}, "top_p"),
    ({"top_p": -0.5}, "top_p"),
    ({"top_k": 0}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"stop": 3}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["ok", ""]}, "stop"),
    ({"stop": ["x" * 100_000]}, "stop"),
    ({"stop": ["ab"] * 1000}, "stop"),
    ({"logit_bias": {"384": 1}}, "logit_bias"),
    ({"logit_bias": {"999999": 5}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"3": 101}}, "logit_bias"),
    ({"logit_bias": {"3": "x"}}, "logit_bias"),
    ({"logit_bias": [3]}, "logit_bias"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"dtype": "float"}, "dtype"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"nonsense": 1}, "nonsense"),
]

OPENAI: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [200_000]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [[1, 2], [999_999_999]]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": "hi", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "hi", "max_tokens": 2.5}, "max_tokens"),
    ({"prompt": "hi", "max_tokens": "4"}, "max_tokens"),
    ({"prompt": "hi", "temperature": -1}, "temperature"),
    ({"prompt": "hi", "temperature": "NaN"}, "temperature"),
    ({"prompt": "hi", "top_p": 2}, "top_p"),
    ({"prompt": "hi", "logit_bias": {"999999": 5}}, "logit_bias"),
    ({"prompt": "hi", "model": 3}, "model"),
    ({"prompt": "hi", "stream": "yes"}, "stream"),
    ({"prompt": "hi", "stop": [1]}, "stop"),
]

BODIES: list[bytes] = [
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"{",
    b'{"text": "a"',
    b"{'text': 'a'}",
    b'{"text": NaN}',
    b'{"text": "a", "sampling_params": {"temperature": NaN}}',
    b'{"text": "a", "sampling_params": {"temperature": Infinity}}',
    b'{"text": "a", "sampling_params": {"temperature": 1e999}}',
    b'{"text": "\\ud800"}',
    b'{"text": "\\udc00\\ud800"}',
    b'{"text": "\xff\xfe"}',
    b'{"text": "\xed\xa0\x80"}',
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"\x80\x04K\x01.",
]


@pytest.fixture
def server(servers: ServerFactory, stage: str) -> ServerDriver:
    return servers(stage)


def check_all(server: ServerDriver, path: str, cases: list[tuple[dict[str, Any], str]]) -> None:
    """Every body is refused with a message and a ``param`` that name the field."""
    with probe(server):
        for body, field in cases:
            error = is_error(server.client.post(path, json=body))
            assert field in error["message"], f"{body}: {error}"
            assert error["type"] == "invalid_request_error"


def test_generate(server: ServerDriver) -> None:
    check_all(server, "/generate", GENERATE)


def test_sampling_params(server: ServerDriver) -> None:
    check_all(server, "/generate", [({"text": "a", "sampling_params": p}, name) for p, name in SAMPLING])


@pytest.mark.needs("openai.completions")
def test_completions(server: ServerDriver) -> None:
    check_all(server, "/v1/completions", OPENAI)


def test_bad_input_of_a_stream_is_a_status(server: ServerDriver) -> None:
    """The refusal comes before the stream's head, not as an event in it."""
    check_all(
        server, "/generate", [({**body, "stream": True}, f) for body, f in GENERATE if f == "input_ids"]
    )


def test_bodies_that_are_no_json(server: ServerDriver) -> None:
    with probe(server):
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            for body in BODIES:
                is_error(server.client.post(path, content=body, headers={"content-type": "application/json"}))


def test_one_bad_prompt_fails_the_call_alone(server: ServerDriver) -> None:
    with probe(server):
        before = internal_state(server)["generated_tokens"]
        is_error(server.client.post("/generate", json={"input_ids": [[1, 2], [3, 9999]]}))
        assert internal_state(server)["generated_tokens"] == before, "the good prompt must not have run"


def test_routes_and_methods(server: ServerDriver) -> None:
    is_error(server.client.get("/nowhere"), 404)
    is_error(server.client.get("/generate"), 405)
    is_error(server.client.delete("/v1/completions"), 405)
    is_error(server.client.post("/v1/embeddings", json={}), 404)


def test_a_body_too_large(server: ServerDriver) -> None:
    with probe(server):
        is_error(server.client.post("/generate", json={"text": "x" * (40 << 20)}), 413)


@pytest.mark.slow
def test_prompts_beyond_the_limits(server: ServerDriver, servers: ServerFactory, stage: str) -> None:
    """Both limits are named, at once; the longest prompt that fits is served."""
    for driver, limit in ((server, 2047), (servers(stage, "llama", "--max-total-tokens", "300"), 298)):
        with probe(driver):
            error = is_error(driver.client.post("/generate", json={"input_ids": [5] * (limit + 1)}))
            assert "2047" in error["message"], "the context's limit"
            state = internal_state(driver)
            assert str(state["size"] - 2) in error["message"], "the pool's limit"
            is_error(driver.client.post("/generate", json={"text": "some words " * 10_000}))
            params = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
            answer = generate(driver, input_ids=[5] * limit, sampling_params=params)
            assert answer["meta_info"]["finish_reason"]["type"] == "length"


def test_max_tokens(server: ServerDriver) -> None:
    """Probe B03: 0 is empty and ends with length; null is the default; huge is clamped to what fits."""
    with probe(server):
        for limit, tokens in ((0, 0), (1, 1), (None, 16)):
            body = {"prompt": "hi", "max_tokens": limit, "ignore_eos": True}
            answer = server.client.post("/v1/completions", json=body).json()
            assert answer["usage"]["completion_tokens"] == tokens
            assert answer["choices"][0]["finish_reason"] == "length"
            assert (answer["choices"][0]["text"] == "") == (tokens == 0)
        huge = {"prompt": [7] * 2000, "max_tokens": 10_000_000, "ignore_eos": True}
        answer = server.client.post("/v1/completions", json=huge).json()
        assert answer["usage"]["completion_tokens"] in (47, 48)
        assert answer["choices"][0]["finish_reason"] == "length"


def test_temperatures(server: ServerDriver) -> None:
    """Probe B09: none and almost none are greedy, the largest float works, and so does null."""

    def ask(temperature: float | None) -> str:
        body = {"prompt": "Counting", "max_tokens": 12, "temperature": temperature, "seed": 3}
        response = server.client.post("/v1/completions", json=body)
        assert response.status_code == 200
        return response.json()["choices"][0]["text"]

    with probe(server):
        assert ask(0) == ask(0) == ask(1e-4) == ask(1e-9) == ask(1e-300)
        assert ask(2) and ask(1e9) and ask(1e300)
        assert ask(None) == ask(1)


def test_greedy_and_sampled_requests_together(server: ServerDriver) -> None:
    """Probe B09: the greedy ones answer as they do alone."""
    params = [{"temperature": 0 if i % 2 else 1.3, "max_new_tokens": 20} for i in range(12)]
    texts = [f"Number {i} of the" for i in range(12)]
    answers = generate(server, text=texts, sampling_params=params)
    for i in range(1, 12, 2):
        alone = generate(server, text=texts[i], sampling_params=params[i])
        assert answers[i]["text"] == alone["text"]


LATER: list[tuple[str, Any]] = [
    *(("n", 2), ("best_of", 3), ("echo", True), ("logprobs", 1), ("frequency_penalty", 0.5)),
    *(("presence_penalty", -1), ("suffix", "x"), ("stream_options", {"include_usage": True})),
    *(("repetition_penalty", 1.2), ("min_p", 0.1), ("min_tokens", 3), ("stop_token_ids", [5])),
    *(("response_format", {"type": "json_object"}), ("tools", [{"type": "function"}])),
]


@pytest.mark.slow
def test_parameters_of_later_stages_are_refused_by_name(server: ServerDriver, stage: str) -> None:
    """Never ignored in silence: the message names the parameter and the stage that adds it."""
    from importlib import import_module

    table = import_module(DIALECTS[stage].package).LATER_PARAMETERS
    with probe(server):
        for name, value in LATER:
            if name not in table:
                continue
            for path, body in (
                ("/v1/completions", {"prompt": "hi"}),
                ("/v1/chat/completions", {"messages": CHAT}),
                ("/generate", {"text": "hi"}),
            ):
                error = is_error(server.client.post(path, json={**body, name: value}))
                assert name in error["message"] and table[name].added_in in error["message"], error
            neutral = table[name].neutral[-1]
            response = server.client.post("/v1/completions", json={"prompt": "hi", name: neutral})
            assert response.status_code == 200, response.text
        for name in sorted(set(table) & {"min_new_tokens", "stop_token_ids", "frequency_penalty"}):
            params = {name: [9_999_999] if "ids" in name else 5}
            response = server.client.post("/generate", json={"text": "a", "sampling_params": params})
            assert name in is_error(response)["message"]


def test_unknown_fields_pass_on_the_openai_routes(server: ServerDriver) -> None:
    body = {"prompt": "hi", "max_tokens": 2, "safety_identifier": "x", "store": False}
    assert server.client.post("/v1/completions", json=body).status_code == 200


@pytest.mark.slow
def test_api_key(servers: ServerFactory, stage: str) -> None:
    """401 without the key, and the key is shown nowhere."""
    key = "sk-very-secret-öäü-key"
    driver = servers(stage, "llama", "--api-key", key, "--max-total-tokens", "500")
    client = driver.client
    good: dict[Any, Any] = {"authorization": b"Bearer " + key.encode()}
    wrong: list[dict[Any, Any]] = [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": key.encode()},
        {"x-api-key": "a"},
    ]
    assert client.get("/health").status_code == 200
    for headers in wrong:
        is_error(client.post("/generate", json={"text": "a"}, headers=headers), 401)
        is_error(client.get("/get_internal_state", headers=headers), 401)
        is_error(client.post("/flush_cache", headers=headers), 401)
    assert client.post("/generate", json={"text": "a"}, headers=good).status_code == 200
    shown = client.get("/get_server_args", headers=good).text
    assert "very-secret" not in shown and "very-secret" not in driver.log()
    assert json.loads(shown)["max_total_tokens"] == 500


def test_the_canary_lives(server: ServerDriver) -> None:
    assert canary(server) == canary(server)
