"""Several answers to one prompt: one prefill that warms the cache, then ``n`` requests that find the prompt there.

Sent together, the requests would compute the same prompt n times: none of them could find it in the tree yet. Main
only; pure functions on requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ..sampling_params import SamplingParams
from .call import ReqState
from .io_struct import TokenizedGenerateReqInput

WARMING = SamplingParams(max_new_tokens=0, temperature=0.0)


def warming_request(request: TokenizedGenerateReqInput) -> TokenizedGenerateReqInput:
    """The prefill that comes first. What is asked of the prompt itself is asked of it, once for all samples."""
    return replace(request, sampling_params=WARMING, regex_index=None, stream=False)


def samples_of(request: TokenizedGenerateReqInput) -> list[TokenizedGenerateReqInput]:
    """The requests for the answers: ``request`` itself if it wants one, else named ``RID-0``, ``RID-1`` and so on.

    With a seed, sample i draws as a request of its own with ``seed + i`` would.
    """
    params = request.sampling_params
    if params.n == 1:
        return [request]
    return [
        replace(
            request,
            rid=f"{request.rid}-{i}",
            sampling_params=replace(
                params, n=1, seed=None if params.seed is None else _wrap(params.seed + i)
            ),
            logprob_start_len=len(request.input_ids) - 1,
        )
        for i in range(params.n)
    ]


def share_prefills(warmed: Sequence[ReqState], states: Sequence[ReqState], n: int) -> None:
    """Let each sample's state know the prefill that its prompt was computed by."""
    for state in states:
        state.warmed_by = warmed[state.index // n]


def _wrap(seed: int) -> int:
    """``seed`` as a 64-bit integer, so that the largest seed has successors too."""
    return (seed + 2**63) % 2**64 - 2**63
