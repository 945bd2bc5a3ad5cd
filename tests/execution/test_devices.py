"""Which device a rank gets, and what is said where there are too few."""

from __future__ import annotations

import pytest
import torch

from stages.v0_1_genesis.managers.router.model_runner import choose_device
from stages.v0_1_genesis.server_args import ServerArgs


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
