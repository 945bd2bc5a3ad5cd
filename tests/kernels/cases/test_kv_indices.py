"""The slots of a batch end to end, against a loop."""

from __future__ import annotations

import pytest
import torch

from stages.v0_2_cudagraph.layers import kv_indices
from stages.v0_2_cudagraph.layers.kv_indices import gather_kv_indices

from .setting import DEVICE, MARKS, index

pytestmark = MARKS


@pytest.mark.parametrize("seq_lens", [[1], [5, 1, 40], [1024, 1, 1025], [2] * 7])
def test_slots_end_to_end(seq_lens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_indices, "SUMMED_AT_ONCE", 4)  # so that seven requests take two rounds
    table = torch.randperm(9 * 2000, device=DEVICE, dtype=torch.int32).view(9, 2000)
    rows = torch.randperm(9)[: len(seq_lens)].tolist()
    slots = gather_kv_indices(table, index(rows), index(seq_lens), sum(seq_lens), max(seq_lens))
    assert slots.dtype == torch.int32
    expected = [table[row, :seq_len] for row, seq_len in zip(rows, seq_lens, strict=True)]
    assert torch.equal(slots, torch.cat(expected))
