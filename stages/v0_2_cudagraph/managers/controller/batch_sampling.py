"""From logits to the next tokens of a batch: bias, masks, temperature, top-k, top-p, and one draw a request.

Called after every forward pass of a rank's model; keeps nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...constrained.logit_mask import mask_logits
from ...layers.parallel_state import tensor_model_parallel_broadcast
from ...support.sampling_ops import best, draw, keep_top_k, keep_top_p, uniform

if TYPE_CHECKING:
    from .infer_batch import Req


def sample_tokens(reqs: Sequence[Req], logits: Tensor) -> list[int]:
    """Choose one token a request from ``logits`` ``[bs, vocab]``, which it may change.

    The step's one copy back to the host is the new ids.
    """
    _add_logit_bias(reqs, logits)
    _mask_disallowed(reqs, logits)
    chosen = best(logits)
    if sampled := [i for i, req in enumerate(reqs) if not req.sampling_params.is_greedy]:
        chosen[sampled] = _draw(logits[sampled], [reqs[i] for i in sampled])
    # Ranks hold equal logits, but some CUDA reductions add in no fixed order: one rank decides for all.
    return tensor_model_parallel_broadcast(chosen).tolist()


def _draw(logits: Tensor, reqs: Sequence[Req]) -> Tensor:
    """Sample the rows of ``logits`` ``[len(reqs), vocab]`` with temperature, top-k and top-p.

    Each row has a uniform number of its own, so that a seed means the same in any batch.
    """
    params = [req.sampling_params for req in reqs]
    columns = torch.tensor(
        [[p.temperature for p in params], [uniform(req.seed, len(req.output_ids)) for req in reqs]],
        dtype=torch.float32,
        device=logits.device,
    )
    logits /= columns[0].unsqueeze(1)
    if rows := [i for i, p in enumerate(params) if p.top_k > 0]:
        keep_top_k(logits, rows, [params[i].top_k for i in rows])
    if rows := [i for i, p in enumerate(params) if p.top_p < 1.0]:
        keep_top_p(logits, rows, [params[i].top_p for i in rows])
    return draw(logits, columns[1])


def _add_logit_bias(reqs: Sequence[Req], logits: Tensor) -> None:
    rows, token_ids, values = [], [], []
    for row, req in enumerate(reqs):
        if not (logit_bias := req.sampling_params.logit_bias):
            continue
        for token_id, value in logit_bias.items():
            rows.append(row)
            token_ids.append(token_id)
            values.append(value)
    if rows:
        bias = torch.tensor(values, dtype=logits.dtype, device=logits.device)
        logits.index_put_(
            (torch.tensor(rows, device=logits.device), torch.tensor(token_ids, device=logits.device)),
            bias,
            accumulate=True,
        )


def _mask_disallowed(reqs: Sequence[Req], logits: Tensor) -> None:
    for row, req in enumerate(reqs):
        if (allowed := req.allowed_token_ids) is not None:
            kept = logits[row, allowed]
            logits[row] = -torch.inf
            logits[row, allowed] = kept
    constrained = {
        row: (fsm, req.regex_fsm_state) for row, req in enumerate(reqs) if (fsm := req.regex_fsm) is not None
    }
    if constrained:
        mask_logits(logits, list(constrained), list(constrained.values()))
