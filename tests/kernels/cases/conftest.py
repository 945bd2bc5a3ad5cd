"""Where the cases run. Without the interpreter and without a GPU there is nothing to collect here."""

from __future__ import annotations

import pytest
import torch

from .setting import CUDA, INTERPRETED

collect_ignore_glob = [] if INTERPRETED or CUDA else ["test_*.py"]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
