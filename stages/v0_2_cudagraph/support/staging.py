"""One buffer for all the small integers that a step sends to the device.

Owned by whoever prepares batches; reused every step. Many small host-to-device copies cost more than the
bytes they carry (about 7 µs each), so a step packs its metadata and copies once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class StagingBuffer:
    """Packs integer lists into pinned memory and hands out views of their copy on the device.

    A step must not pack before the previous step's copy has been read by the device; reading a step's
    new token ids on the host, which every step ends with, makes sure of that.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._pinned = torch.empty(0, dtype=dtype)

    def upload(self, *columns: Sequence[int]) -> list[Tensor]:
        """Copy ``columns`` to the device in one go: one tensor ``[len(column)]`` each, in their order."""
        lengths = [len(column) for column in columns]
        if self.device.type == "cpu":
            # Nothing to copy; a fresh tensor, so that what a caller keeps does not change under it.
            packed = torch.empty(sum(lengths), dtype=self.dtype)
            self._fill(packed, columns)
            return list(packed.split(lengths))
        if self._pinned.numel() < sum(lengths):
            self._pinned = torch.empty(2 * sum(lengths), dtype=self.dtype, pin_memory=True)
        staged = self._pinned[: sum(lengths)]
        self._fill(staged, columns)
        return list(staged.to(self.device, non_blocking=True).split(lengths))

    def _fill(self, target: Tensor, columns: Sequence[Sequence[int]]) -> None:
        host = target.numpy()
        np.concatenate([np.asarray(column, dtype=host.dtype) for column in columns], out=host)
