"""The real server with the curl binary: what a reader types from the README."""

from __future__ import annotations

import json
import subprocess

import pytest

from strata.adapters import ServerDriver

from .fixtures import ServerFactory
from .speaking import generate, internal_state, probe, wait_idle


@pytest.fixture
def server(servers: ServerFactory, stage: str) -> ServerDriver:
    return servers(stage)


def curl(server: ServerDriver, path: str, *options: str) -> str:
    command = ["curl", "-sS", "--noproxy", "*", "--max-time", "20", *options, server.base_url + path]
    return subprocess.run(command, capture_output=True, check=True, text=True, timeout=30).stdout


JSON = ("-H", "content-type: application/json", "-d")


def test_get(server: ServerDriver) -> None:
    for path in ("/health", "/health_generate", "/get_model_info", "/get_internal_state", "/v1/models"):
        assert json.loads(curl(server, path))


def test_post(server: ServerDriver) -> None:
    body = {"text": "The quick", "sampling_params": {"temperature": 0, "max_new_tokens": 9}}
    answer = json.loads(curl(server, "/generate", *JSON, json.dumps(body)))
    assert answer["text"] == generate(server, **body)["text"]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
    answer = json.loads(curl(server, "/v1/chat/completions", *JSON, json.dumps(chat)))
    assert answer["choices"][0]["message"]["role"] == "assistant"


def test_stream(server: ServerDriver) -> None:
    body = {"prompt": "The quick", "temperature": 0, "max_tokens": 9, "stream": True}
    lines = curl(server, "/v1/completions", "-N", *JSON, json.dumps(body)).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: {") for line in lines[:-2])


def test_form_data_is_refused(server: ServerDriver) -> None:
    """curl without a content type says it sends a form; the answer says what is wanted."""
    out = curl(server, "/generate", "-d", '{"text": "a"}', "-w", "\n%{http_code}")
    answer, _, status = out.rpartition("\n")
    if status == "400":
        assert "application/json" in json.loads(answer)["error"]["message"]
    else:
        assert status == "200", "either it is refused by name, or taken as the JSON that it is"


@pytest.mark.parametrize("streaming", ["true", "false"])
def test_a_killed_client_ends_its_request(server: ServerDriver, streaming: str) -> None:
    """Probe B16, as it is written there."""
    with probe(server):
        before = internal_state(server)["generated_tokens"]
        body = f'{{"prompt": "count", "max_tokens": 2000, "ignore_eos": true, "stream": {streaming}}}'
        command = ["timeout", "0.3", "curl", "-sN", "--noproxy", "*", *JSON, body]
        subprocess.run([*command, f"{server.base_url}/v1/completions"], stdout=subprocess.DEVNULL, timeout=10)
        wait_idle(server)
        assert internal_state(server)["generated_tokens"] - before < 2000


@pytest.mark.needs("openai.n", "openai.echo", "openai.logprobs")
def test_what_evaluations_ask(server: ServerDriver) -> None:
    """Several answers, the prompt echoed, log probabilities; streamed, usage comes with every chunk or not at all."""
    body = {"prompt": ["The quick", "a"], "max_tokens": 3, "n": 2, "echo": True, "logprobs": 2, "seed": 1}
    answer = json.loads(curl(server, "/v1/completions", *JSON, json.dumps(body)))
    assert [choice["text"][:1] for choice in answer["choices"]] == ["T", "T", "a", "a"]
    for choice in answer["choices"]:
        assert len({len(values) for values in choice["logprobs"].values()}) == 1
    lines = curl(server, "/v1/completions", "-N", *JSON, json.dumps(body | {"stream": True})).split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1, 2, 3}
    assert len({"usage" in chunk for chunk in chunks}) == 1
