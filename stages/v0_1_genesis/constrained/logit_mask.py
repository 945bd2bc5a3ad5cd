"""Takes from the logits of constrained requests what their regexes do not allow. Called once per sampled step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .fsm import RegexFSM, RegexState


def mask_logits(logits: Tensor, rows: list[int], where: Sequence[tuple[RegexFSM, RegexState]]) -> None:
    """Set every token that is not allowed to -inf, in place.

    ``logits`` float ``[bs, vocab]``; ``where[i]`` says where the request in row ``rows[i]`` stands. Only these
    rows are read or written, and only their masks (a bool per token) go to the device, in one copy.
    """
    allowed = torch.from_numpy(np.stack([fsm.allowed_mask(state) for fsm, state in where]))
    refused = allowed.logical_not_().to(logits.device, non_blocking=True)
    if len(rows) == len(logits):
        logits.masked_fill_(refused, -torch.inf)
    else:
        logits[rows] = logits[rows].masked_fill_(refused, -torch.inf)
