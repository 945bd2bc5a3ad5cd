"""Where a captured graph looks for a decode step's inputs: tensors whose addresses never change.

Owned by the CudaGraphRunner. Graphs of all sizes read the fronts of the same buffers.
"""

from __future__ import annotations

import torch

from .infer_batch import Batch

PADDING = {"input_ids": 0, "positions": 0, "req_pool_indices": 0, "seq_lens": 1, "out_cache_loc": 0}
"""What a row without a request holds: one token, of row 0, stored in slot 0, which is no request's (INV-PAD)."""


class StaticInputs:
    """One integer tensor ``[5, max_size]``, a row for each input, so that filling it takes few launches.

    ``input_ids``, ``positions``, ``req_pool_indices``, ``seq_lens``, ``out_cache_loc`` ``[max_size]`` are
    views of it.
    """

    def __init__(self, max_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._padding = torch.tensor(list(PADDING.values()), dtype=dtype, device=device).unsqueeze(1)
        self._buffer = self._padding.repeat(1, max_size)
        self.input_ids, self.positions, self.req_pool_indices, self.seq_lens, self.out_cache_loc = (
            self._buffer
        )

    def fill(self, batch: Batch, size: int) -> None:
        """The requests of ``batch``, and padding up to ``size`` rows."""
        batch_size = len(batch)
        self._buffer[:, :batch_size] = torch.stack([getattr(batch, name) for name in PADDING])
        if batch_size < size:
            self._buffer[:, batch_size:size] = self._padding
