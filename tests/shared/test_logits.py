"""Logits within 5e-4 of transformers' in float32, in every forward of a mixed, cached, decoding workload."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from strata.adapters import Engine
from tests.models.tiny import TINY_MODELS

from .driving import greedy, prompt, run
from .fixtures import EngineFactory, model_folder
from .reference import LOGIT_TOLERANCE, reference


def observe_logits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every row of logits that the engine's forwards return from now on (before the sampler changes them)."""
    rows: list[Tensor] = []
    forward = engine.runner.forward

    def observed(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        rows.extend(output.next_token_logits.float().clone())
        return output

    monkeypatch.setattr(engine.runner, "forward", observed)
    return rows


def check_logits(
    engine: Engine, model: str, lengths: list[int], vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a cold wave, then a warm one; match every observed row to the reference's, one to one."""
    oracle = reference(model_folder(model))
    expected: list[Tensor] = []
    rows = observe_logits(engine, monkeypatch)
    for tail in (0, 3):
        prompts = [prompt(length, 8, vocab) + prompt(tail, 9, vocab) for length in lengths]
        rids = {engine.add(ids, greedy(6)): ids for ids in prompts}
        answers = run(engine)
        for rid, ids in rids.items():
            expected.extend(oracle.logits([*ids, *answers[rid].ids], last=7)[:-1])
    assert len(rows) == len(expected)
    distance = torch.stack([(row - torch.stack(expected)).abs().amax(dim=-1) for row in rows])
    assert (distance.amin(dim=1) < LOGIT_TOLERANCE).all(), f"worst row: {distance.amin(dim=1).max():.2e}"
    assert len(set(distance.argmin(dim=1).tolist())) == len(rows), "two rows match one expectation"


@pytest.mark.parametrize("model", TINY_MODELS)
def test_tiny(engines: EngineFactory, stage: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_logits(engines(stage, model), model, [1, 2, 30, 64, 140], 384, monkeypatch)


@pytest.mark.slow
def test_smollm2(engines: EngineFactory, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_logits(engines(stage, "smollm2"), "smollm2", [1, 50, 300], 40_000, monkeypatch)
