"""Bad input: always a 4xx with the OpenAI error object that names the field and the limit; never a 5xx."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.v0_1_genesis import LATER_PARAMETERS

from .conftest import FakeServer

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def sampling(**params: Any) -> dict[str, Any]:
    return {"text": "the", "sampling_params": params}


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "the"} | fields


def check_error(response: httpx.Response, status: int, *said: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    for text in said:
        assert text in error["message"], error
    if status == 400:
        assert error["type"] == "invalid_request_error"


BAD_BODIES: list[tuple[str, Any, tuple[str, ...]]] = [
    # empty and missing prompts
    (GENERATE, {}, ("text", "input_ids")),
    (GENERATE, {"text": ""}, ("text", "empty")),
    (GENERATE, {"text": []}, ("text", "empty")),
    (GENERATE, {"text": ["the", ""]}, ("text", "empty")),
    (GENERATE, {"input_ids": []}, ("input_ids", "empty")),
    (GENERATE, {"input_ids": [[1], []]}, ("input_ids", "empty")),
    (GENERATE, {"text": "a", "input_ids": [1]}, ("text", "input_ids")),
    (COMPLETIONS, {}, ("prompt",)),
    (COMPLETIONS, {"prompt": ""}, ("prompt", "empty")),
    (COMPLETIONS, {"prompt": []}, ("prompt", "empty")),
    (COMPLETIONS, {"prompt": None}, ("prompt",)),
    (CHAT, {}, ("messages",)),
    (CHAT, {"messages": []}, ("messages", "empty")),
    (CHAT, {"messages": [{"content": "x"}]}, ("role",)),
    (CHAT, {"messages": ["hi"]}, ("messages[0]",)),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        ("image_url",),
    ),
    # ids out of the vocabulary (probe B05)
    (GENERATE, {"input_ids": [512]}, ("input_ids", "512", "511")),
    (GENERATE, {"input_ids": [-1]}, ("input_ids", "-1")),
    (GENERATE, {"input_ids": [[1, 2], [999999999]]}, ("input_ids", "999999999")),
    (COMPLETIONS, {"prompt": [200000]}, ("prompt", "200000", "511")),
    (COMPLETIONS, {"prompt": [10**30]}, ("prompt", "511")),
    (COMPLETIONS, {"prompt": [-1]}, ("prompt", "-1")),
    (COMPLETIONS, {"prompt": [[1, 2], [999999999]]}, ("prompt", "999999999")),
    (COMPLETIONS, {"prompt": [1.5]}, ("prompt[0]", "float")),
    (COMPLETIONS, {"prompt": [True]}, ("prompt[0]", "bool")),
    (COMPLETIONS, {"prompt": [1, "a"]}, ("prompt", "one kind")),
    (COMPLETIONS, {"prompt": ["a"] * 1025}, ("prompt", "1024", "1025")),
    (COMPLETIONS, completion(logit_bias={"999999": 5}), ("logit_bias", "999999", "511")),
    (COMPLETIONS, completion(logit_bias={"-1": 5}), ("logit_bias",)),
    (COMPLETIONS, completion(logit_bias={"x": 5}), ("logit_bias",)),
    (COMPLETIONS, completion(logit_bias={"1": 101}), ("logit_bias", "100")),
    # prompts longer than the context (256) or the pool (400)
    (GENERATE, {"input_ids": [1] * 256}, ("input_ids", "256 tokens", "255", "398")),
    (GENERATE, {"text": "the" * 300}, ("text", "tokens", "255", "398")),
    (GENERATE, {"text": "x" * 200_000}, ("text", "200000 characters", "255")),
    (COMPLETIONS, {"prompt": ["a", "a " * 300]}, ("prompt", "tokens", "255")),
    (CHAT, {"messages": [{"role": "user", "content": "a b c " * 300}]}, ("messages", "tokens", "255")),
    # counts (probe B03), temperatures (probe B09) and the rest of the sampling parameters
    (COMPLETIONS, completion(max_tokens=-1), ("max_tokens", "at least 0", "-1")),
    (COMPLETIONS, completion(max_tokens=2.5), ("max_tokens", "float")),
    (COMPLETIONS, completion(max_tokens="4"), ("max_tokens", "str")),
    (COMPLETIONS, completion(max_tokens=True), ("max_tokens", "bool")),
    (CHAT, HI | {"max_tokens": -1}, ("max_tokens",)),
    (CHAT, HI | {"max_completion_tokens": -1}, ("max_completion_tokens",)),
    (GENERATE, sampling(max_new_tokens=-1), ("max_new_tokens",)),
    (GENERATE, sampling(max_new_tokens=1.5), ("sampling_params.max_new_tokens", "float")),
    (GENERATE, sampling(temperature=-1), ("temperature", "at least 0")),
    (GENERATE, sampling(temperature="NaN"), ("sampling_params.temperature", "str")),
    (GENERATE, sampling(temperature=None), ("temperature",)),
    (COMPLETIONS, completion(temperature=-0.1), ("temperature",)),
    (COMPLETIONS, completion(temperature="nan"), ("temperature",)),
    (COMPLETIONS, completion(top_p=0), ("top_p", "(0, 1]")),
    (COMPLETIONS, completion(top_p=1.5), ("top_p",)),
    (COMPLETIONS, completion(top_k=0), ("top_k",)),
    (COMPLETIONS, completion(top_k=-2), ("top_k",)),
    (COMPLETIONS, completion(seed=2**63), ("seed",)),
    (COMPLETIONS, completion(seed=10**40), ("seed",)),
    (COMPLETIONS, completion(seed=1.5), ("seed",)),
    (COMPLETIONS, completion(stop=""), ("stop", "1 to 512")),
    (COMPLETIONS, completion(stop=["x"] * 17), ("stop", "16")),
    (COMPLETIONS, completion(stop="x" * 513), ("stop", "513")),
    (COMPLETIONS, completion(stop=[1]), ("stop",)),
    (COMPLETIONS, completion(stream="yes"), ("stream",)),
    (COMPLETIONS, completion(dtype="float"), ("dtype",)),
    (GENERATE, {"text": "a", "sampling_params": "greedy"}, ("sampling_params",)),
    (GENERATE, {"text": ["a", "b"], "sampling_params": [{}]}, ("sampling_params", "2")),
    # unknown fields, on /generate alone
    (GENERATE, {"text": "a", "txet": "b"}, ("txet",)),
    (GENERATE, sampling(max_tokens=3), ("max_tokens",)),
    # names
    (GENERATE, {"text": "a", "rid": ""}, ("rid", "256")),
    (GENERATE, {"text": "a", "rid": "r" * 257}, ("rid", "257")),
    (GENERATE, {"text": "a", "rid": 7}, ("rid", "int")),
    (GENERATE, {"text": ["a", "b"], "rid": "r"}, ("rid", "list")),
    (GENERATE, {"text": ["a", "b"], "rid": ["r"]}, ("rid", "2")),
    (GENERATE, {"text": ["a", "b"], "rid": ["r", "r"]}, ("rid", "unique")),
    # other fields
    (GENERATE, {"text": "a", "image_data": "x.png"}, ("image_data",)),
    (GENERATE, {"text": "a", "normalized_logprob_start_len": -1}, ("normalized_logprob_start_len",)),
    (GENERATE, {"text": "a", "normalized_logprob_start_len": 10**20}, ("normalized_logprob_start_len",)),
    (GENERATE, {"text": 7}, ("text", "int")),
    (COMPLETIONS, completion(model=7), ("model",)),
]


@pytest.mark.parametrize(("route", "body", "said"), BAD_BODIES, ids=lambda value: repr(value)[:60])
def test_bad_fields_are_named(server: FakeServer, route: str, body: Any, said: tuple[str, ...]) -> None:
    check_error(server.client.post(route, json=body), 400, *said)


NO_JSON = {
    "empty": b"",
    "blank": b"  ",
    "no JSON": b"hello",
    "truncated": b'{"text": "a"',
    "trailing": b'{"text": "a"} x',
    "array": b'["a"]',
    "string": b'"a"',
    "null": b"null",
    "NaN": b'{"text": "a", "sampling_params": {"temperature": NaN}}',
    "Infinity": b'{"text": "a", "sampling_params": {"temperature": Infinity}}',
    "huge float": b'{"text": "a", "sampling_params": {"temperature": 1e999}}',
    "huge int as float": b'{"text": "a", "sampling_params": {"temperature": 1' + b"0" * 400 + b"}}",
    "endless int": b'{"text": "a", "sampling_params": {"max_new_tokens": ' + b"1" * 100_000 + b"}}",
    "deep array": b'{"text": ' + b"[" * 100_000,
    "deep, closed": b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "deep object": b'{"a":' * 100_000,
    "lone surrogate": b'{"text": "\\ud800"}',
    "lone surrogate in a key": b'{"\\ud800": 1}',
    "encoded surrogate": b'{"text": "\xed\xa0\x80"}',
    "no UTF-8": b'{"text": "\xff"}',
    "UTF-16": '{"text": "a"}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"text": "a"}',
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
}


@pytest.mark.parametrize("route", [GENERATE, COMPLETIONS, CHAT])
@pytest.mark.parametrize("name", NO_JSON)
def test_what_is_no_json_object_is_a_400(server: FakeServer, route: str, name: str) -> None:
    response = server.client.post(route, content=NO_JSON[name], headers={"content-type": "application/json"})
    check_error(response, 400)


def test_a_lone_surrogate_is_called_by_its_name(server: FakeServer) -> None:
    check_error(server.client.post(GENERATE, content=NO_JSON["lone surrogate"]), 400, "surrogate")


def test_the_last_of_two_equal_keys_counts_and_is_checked(server: FakeServer) -> None:
    check_error(server.client.post(GENERATE, content=b'{"text": "a", "text": 7}'), 400, "text")


@pytest.mark.parametrize(
    "content_type", ["text/plain", "multipart/form-data; boundary=x", "application/xml", "é"]
)
def test_other_content_types_are_refused(server: FakeServer, content_type: str) -> None:
    headers = [(b"content-type", content_type.encode())]
    check_error(server.client.post(GENERATE, content=b'{"text": "a"}', headers=headers), 400, "content-type")


@pytest.mark.parametrize(
    ("value", "added"),
    [(("n", 2), "v0.2"), (("frequency_penalty", 0.5), "v0.3"), (("tools", [{}]), "no stage")],
)
@pytest.mark.parametrize("route", [GENERATE, COMPLETIONS, CHAT])
def test_a_later_stages_parameter_names_that_stage(
    server: FakeServer, route: str, value: tuple[str, Any], added: str
) -> None:
    body = {GENERATE: {"text": "a"}, COMPLETIONS: completion(), CHAT: HI}[route]
    check_error(server.client.post(route, json=body | dict([value])), 400, value[0], added)
    if route == GENERATE:
        check_error(server.client.post(route, json=sampling(**dict([value]))), 400, value[0], added)


@pytest.mark.parametrize("route", [GENERATE, COMPLETIONS, CHAT])
def test_neutral_values_are_accepted_everywhere(server: FakeServer, route: str) -> None:
    body = {
        GENERATE: {"text": "a", "sampling_params": {"max_new_tokens": 1}},
        COMPLETIONS: completion(),
        CHAT: HI,
    }[route]
    for choose in (0, -1):
        neutral = {name: later.neutral[choose] for name, later in LATER_PARAMETERS.items()}
        response = server.client.post(route, json=body | neutral)
        assert response.status_code == 200, response.text


def test_true_is_not_one(server: FakeServer) -> None:
    check_error(server.client.post(COMPLETIONS, json=completion(n=True)), 400, "n ")
    check_error(server.client.post(COMPLETIONS, json=completion(logprobs=0)), 400, "logprobs")


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_openai_routes_ignore_unknown_fields_and_take_nulls(server: FakeServer, route: str) -> None:
    body = completion() if route == COMPLETIONS else HI
    nulls = dict.fromkeys(
        ["temperature", "top_p", "stop", "stream", "seed", "logit_bias", "user", "model", "top_k"]
    )
    response = server.client.post(
        route, json=body | nulls | {"user": "me", "metadata": {"a": 1}, "store": False}
    )
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("count", [0, 1, 10_000_000, 10**30])
def test_counts_beyond_the_limits_are_clamped(server: FakeServer, count: int) -> None:
    choice = server.client.post(COMPLETIONS, json={"prompt": [5] * 250, "max_tokens": count}).json()
    assert choice["usage"]["completion_tokens"] == min(count, 6)
    assert choice["choices"][0]["finish_reason"] == "length"


def test_unknown_paths_and_methods(server: FakeServer) -> None:
    check_error(server.client.get("/nothing"), 404)
    check_error(server.client.get("/generate/"), 404)
    check_error(server.client.get(GENERATE), 405)
    check_error(server.client.delete(COMPLETIONS), 405)
    check_error(server.client.post("/health"), 405)
    assert "allow" in server.client.get(GENERATE).headers


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "text",
    "input_ids",
    "prompt",
    "messages",
    "sampling_params",
    "stream",
    "rid",
    "stop",
    "n",
    "temperature",
]
FIELDS += [
    "max_tokens",
    "logit_bias",
    "seed",
    "top_p",
    "top_k",
    "regex",
    "model",
    "image_data",
    "max_new_tokens",
]


def answer_of_any_kind(response: httpx.Response) -> None:
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        check_error(response, 400)


@settings(max_examples=150)
@given(
    route=st.sampled_from([GENERATE, COMPLETIONS, CHAT]),
    body=st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=6),
)
def test_no_object_whatever_makes_a_5xx(shared_server: FakeServer, route: str, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    answer_of_any_kind(shared_server.client.post(route, content=content, headers=headers))


@settings(max_examples=60)
@given(route=st.sampled_from([GENERATE, COMPLETIONS, CHAT]), body=st.binary(max_size=60))
def test_no_bytes_whatever_make_a_5xx(shared_server: FakeServer, route: str, body: bytes) -> None:
    check_error(shared_server.client.post(route, content=body), 400)
