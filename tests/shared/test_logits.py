"""Logits within 5e-4 of transformers' in float32, in every forward of a mixed, cached, decoding workload."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from strata.adapters import Engine

from .driving import greedy, prompt, run
from .fixtures import EVERY_TINY_MODEL, EngineFactory, model_folder
from .reference import CUDA_LOGIT_TOLERANCE, LOGIT_TOLERANCE, reference


@contextmanager
def observed_logits(engine: Engine) -> Iterator[list[Tensor]]:
    """Every row of logits that the engine's forwards return meanwhile (before the sampler changes them)."""
    rows: list[Tensor] = []

    def observed(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        rows.extend(output.next_token_logits.float().cpu().clone())
        return output

    forward = engine.runner.forward
    with mock.patch.object(engine.runner, "forward", observed):
        yield rows


def worst_error(
    engine: Engine, model: str, lengths: list[int], vocab: int, *, relative: bool = False
) -> float:
    """Run a cold wave, then a warm one; match every observed row to the reference's, one to one.

    Returns the largest difference of any logit, or with ``relative`` the largest share of its row's largest one.
    """
    oracle = reference(model_folder(model))
    rows_expected: list[Tensor] = []
    with observed_logits(engine) as rows:
        for tail in (0, 3):
            prompts = [prompt(length, 8, vocab) + prompt(tail, 9, vocab) for length in lengths]
            rids = {engine.add(ids, greedy(6)): ids for ids in prompts}
            answers = run(engine)
            for rid, ids in rids.items():
                rows_expected.extend(oracle.logits([*ids, *answers[rid].ids], last=7)[:-1])
    assert len(rows) == len(rows_expected)
    expected = torch.stack(rows_expected)
    distance = torch.stack([(row - expected).abs().amax(dim=-1) for row in rows])
    if relative:
        distance /= expected.abs().amax(dim=-1)
    assert len(set(distance.argmin(dim=1).tolist())) == len(rows), "two rows match one expectation"
    return float(distance.amin(dim=1).max())


@pytest.mark.parametrize("model", EVERY_TINY_MODEL)
def test_tiny(engines: EngineFactory, stage: str, model: str, record_property: Any) -> None:
    engine = engines(stage, model)
    worst = worst_error(engine, model, [1, 2, 30, 64, 140], 384)
    record_property("logit error", worst)
    # A GPU sums in another order than the reference, which runs on the CPU.
    assert worst < (LOGIT_TOLERANCE if engine.runner.device.type == "cpu" else CUDA_LOGIT_TOLERANCE)


@pytest.mark.slow
def test_smollm2(engines: EngineFactory, stage: str) -> None:
    assert worst_error(engines(stage, "smollm2"), "smollm2", [1, 50, 300], 40_000) < LOGIT_TOLERANCE
