"""What v0.2's nodes must agree on before they become one server."""

from __future__ import annotations

from typing import Any

import pytest

from stages.v0_2_cudagraph.managers.controller.node_link import shared_settings
from stages.v0_2_cudagraph.server_args import ServerArgs
from tests.models.tiny import tiny_llama


def settings(**fields: Any) -> dict[str, Any]:
    nodes = {"nnodes": 2, "tp_size": 2, "node_rank": 0, "nccl_init_addr": "10.0.0.1:5000"}
    return dict(shared_settings(ServerArgs(**{"model_path": str(tiny_llama("llama")), **nodes, **fields})))


@pytest.mark.parametrize(
    "fields",
    [
        {"node_rank": 1, "nccl_init_addr": "node-0:5000", "dist_timeout": 9},
        {"host": "0.0.0.0", "port": 1, "api_key": "k", "allow_remote_without_key": True},
        {"chat_template": "mine.jinja", "log_level": "error", "disable_log_stats": True},
        {"random_seed": 3},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_concerns_one_node_alone_may_differ(fields: dict[str, Any]) -> None:
    assert settings(**fields) == settings()


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "bfloat16"},
        {"max_total_tokens": 99},
        {"stream_interval": 2},
        {"disable_radix_cache": True},
        {"model_path": str(tiny_llama("mistral"))},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_changes_a_step_may_not(fields: dict[str, Any]) -> None:
    assert settings(**fields) != settings()


def test_no_key_travels() -> None:
    assert "secret" not in str(settings(api_key="secret"))
