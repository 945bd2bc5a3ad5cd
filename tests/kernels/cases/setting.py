"""The device that the cases use, the sizes it can afford, and how close a kernel must come."""

from __future__ import annotations

import os
from typing import TypeVar

import pytest
import torch

T = TypeVar("T")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if CUDA else "cpu")
INDEX_DTYPE = torch.int32 if CUDA else torch.int64
MARKS = [] if INTERPRETED else [pytest.mark.cuda]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest ``‖out - reference‖ / ‖reference‖``: float32 must not have gone through tf32 (about 3e-4)."""


def sizes(tiny: list[T], large: list[T]) -> list[T]:
    """Parameters of a test: the tiny ones anywhere, the large ones on a GPU as well."""
    return tiny + large if CUDA else tiny


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """An output in which every element that a kernel forgets to write shows as NaN."""
    return torch.full(shape, float("nan"), device=DEVICE, dtype=dtype)


def index(values: list[int], dtype: torch.dtype = INDEX_DTYPE) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE, dtype=dtype)


def running_sum(lens: list[int]) -> list[int]:
    """Where each of the pieces begins when they lie end to end."""
    return [sum(lens[:i]) for i in range(len(lens))]


def assert_close(out: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> None:
    assert torch.isfinite(out).all(), "the kernel left elements unwritten, or let a NaN in"
    error = (out.double() - reference).norm() / reference.norm()
    assert error.item() < TOLERANCE[dtype], f"relative error {error.item():.2e}"
