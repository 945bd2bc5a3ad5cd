"""Takes from the logits of constrained requests what their regexes do not allow. Called once per sampled step."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .fsm import RegexFSM, RegexState


def mask_logits(logits: Tensor, rows: list[int], where: Sequence[tuple[RegexFSM, RegexState]]) -> None:
    """Set every token that is not allowed to -inf, in place.

    ``logits`` float ``[bs, vocab]``; ``where[i]`` says where the request in row ``rows[i]`` stands. Only these
    rows are written, and a bit per token of each is all that goes to the device, where every byte of bits looks up
    its eight penalties: adding them takes a twentieth of the time that filling by a mask of bools does on a CPU.
    """
    bits = np.stack([fsm.allowed_bits(state) for fsm, state in where])
    octets = torch.from_numpy(bits).to(logits.device, non_blocking=True).int()
    penalties = F.embedding(octets, _penalties(logits.device, logits.dtype)).view(len(rows), -1)
    index = torch.tensor(rows, device=logits.device)
    logits.index_add_(0, index, penalties[:, : logits.shape[1]])


@functools.cache
def _penalties(device: torch.device, dtype: torch.dtype) -> Tensor:
    """``[256, 8]``: 0 where the bit is set, counted from the highest, else -inf."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    zero = torch.zeros(256, 8, dtype=dtype)
    return zero.masked_fill_(torch.from_numpy(bits) == 0, -torch.inf).to(device)
