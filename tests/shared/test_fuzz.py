"""Random JSON at the routes: a right answer or a 4xx with the error object, never a 5xx, and no harm done."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .fixtures import ServerFactory
from .speaking import PROBE_LIMIT_S, probe

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 400)
    | st.sampled_from([2**31, 2**63, -(2**63), 10**20, 0.5, -1.5, 1e300, 5e-324])
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.just("3"), inner, max_size=3)
    ),
    max_leaves=6,
)
SAMPLING = st.fixed_dictionaries(
    {"max_new_tokens": st.just(2) | JSON},
    optional=dict.fromkeys(
        ("temperature", "top_p", "top_k", "stop", "logit_bias", "seed", "dtype", "ignore_eos", "n"), JSON
    ),
)
IDS = st.lists(st.integers(0, 383), min_size=1, max_size=4)
TEXT = st.text(min_size=1, max_size=8)
BODIES: dict[str, Any] = {
    "/generate": st.fixed_dictionaries(
        {},
        optional={
            "text": TEXT | JSON,
            "input_ids": IDS | JSON,
            "sampling_params": SAMPLING | JSON,
            "stream": JSON,
            "rid": JSON,
            **dict.fromkeys(("return_normalized_logprob", "normalized_logprob_start_len"), JSON),
            **dict.fromkeys(("return_logprob", "logprob_start_len", "top_logprobs_num"), JSON),
            "return_text_in_logprobs": JSON,
        },
    ),
    "/v1/completions": st.fixed_dictionaries(
        {"max_tokens": st.just(2) | JSON},
        optional={
            "prompt": TEXT | IDS | JSON,
            **dict.fromkeys(
                ("model", "temperature", "stop", "stream", "logit_bias", "n", "echo", "logprobs"), JSON
            ),
        },
    ),
    "/v1/chat/completions": st.fixed_dictionaries(
        {"max_tokens": st.just(2) | JSON},
        optional={
            "messages": st.lists(
                st.fixed_dictionaries({"role": st.just("user") | JSON, "content": TEXT | JSON}) | JSON,
                max_size=2,
            )
            | JSON,
            **dict.fromkeys(("temperature", "stop", "stream", "n", "tools", "response_format"), JSON),
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
def test_random_bodies(servers: ServerFactory, stage: str, path: str) -> None:
    server = servers(stage, "llama", "--max-total-tokens", "300")

    @settings(max_examples=150)
    @given(body=BODIES[path])
    def check(body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        response = server.client.post(path, content=content, headers={"content-type": "application/json"})
        assert response.elapsed.total_seconds() < PROBE_LIMIT_S
        assert response.status_code in (200, 400), f"{response.status_code} for {body}: {response.text[:300]}"
        if response.status_code == 400:
            error = response.json()["error"]
            assert error["message"] and {"type", "param", "code"} <= set(error), body

    with probe(server):
        check()
