"""Which device a rank gets, and what is said where there are too few."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stages.v0_1_genesis.managers.router.model_runner import choose_device
from stages.v0_1_genesis.server_args import ServerArgs
from stages.v0_2_cudagraph.managers.controller.model_runner import choose_device as choose_device_v0_2
from stages.v0_2_cudagraph.server_args import ServerArgs as ServerArgsV02


def choose(
    monkeypatch: pytest.MonkeyPatch, num_devices: int, wanted: str, tp_size: int, rank: int = 0
) -> str:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    args = ServerArgs(model_path="unused", device=wanted, tp_size=tp_size)  # type: ignore[arg-type]
    return str(choose_device(args, rank))


def test_each_rank_has_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, 2, "auto", 2, rank=1) == "cuda:1"
    assert choose(monkeypatch, 8, "cuda", 2, rank=0) == "cuda:0"
    assert choose(monkeypatch, 0, "auto", 2, rank=1) == "cpu"
    assert choose(monkeypatch, 2, "cpu", 2, rank=1) == "cpu"


@pytest.mark.parametrize(
    ("num_devices", "wanted", "tp_size", "words"),
    [
        (0, "cuda", 1, "no CUDA device"),
        (1, "cuda", 2, "--tp-size 2 needs 2 CUDA devices, one for each rank, and there is 1"),
        (2, "auto", 4, "--tp-size 4 needs 4 CUDA devices, one for each rank, and there are 2"),
    ],
)
def test_too_few_devices(
    monkeypatch: pytest.MonkeyPatch, num_devices: int, wanted: str, tp_size: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        choose(monkeypatch, num_devices, wanted, tp_size)


def choose_v0_2(
    monkeypatch: pytest.MonkeyPatch, num_devices: int, rank: int, dp_rank: int = 0, **fields: Any
) -> str:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    return str(choose_device_v0_2(ServerArgsV02(model_path="unused", device="cuda", **fields), rank, dp_rank))


def test_replicas_and_nodes_share_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replica has devices of its own; each node numbers its devices from 0."""
    two_by_two = [
        choose_v0_2(monkeypatch, 4, rank, dp_rank, tp_size=2, dp_size=2)
        for dp_rank in range(2)
        for rank in range(2)
    ]
    assert two_by_two == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    ranks = [ServerArgsV02(model_path="", tp_size=4, nnodes=2, node_rank=node).node_ranks for node in (0, 1)]
    assert ranks == [range(2), range(2, 4)]
    on_nodes = [
        choose_v0_2(monkeypatch, 2, rank, tp_size=4, nnodes=2, node_rank=node)
        for node in (0, 1)
        for rank in ranks[node]
    ]
    assert on_nodes == ["cuda:0", "cuda:1"] * 2


def test_too_few_devices_for_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--tp-size 2 --dp-size 2 needs 4 CUDA devices, one for each rank, and there are 3"
    with pytest.raises(ValueError, match=words):
        choose_v0_2(monkeypatch, 3, 0, tp_size=2, dp_size=2)
