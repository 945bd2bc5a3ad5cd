"""The sampler of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
from torch import Tensor

from stages.v0_1_genesis.managers.router import batch_sampling as genesis_sampling
from stages.v0_1_genesis.managers.router.infer_batch import Req as GenesisReq
from stages.v0_1_genesis.sampling_params import SamplingParams as GenesisParams
from stages.v0_2_cudagraph.managers.controller import batch_sampling as cudagraph_sampling
from stages.v0_2_cudagraph.managers.controller.infer_batch import Req as CudaGraphReq
from stages.v0_2_cudagraph.sampling_params import SamplingParams as CudaGraphParams

from .contracts.sampler import Params, SamplerContract

NO_TOKENIZER: Any = SimpleNamespace(eos_token_ids=frozenset())


def made_reqs(
    req_class: Any, params_class: Any, params: Sequence[Params], positions: Sequence[int]
) -> list[Any]:
    """A request for each of ``params``, which has as many output tokens as ``positions`` says."""
    reqs = []
    for row, (fields, position) in enumerate(zip(params, positions, strict=True)):
        req = req_class(f"r{row}", [1], msgspec.convert(dict(fields), params_class), False, NO_TOKENIZER)
        req.output_ids = [0] * position
        reqs.append(req)
    return reqs


class TestGenesisSampler(SamplerContract):
    stage = "v0.1"

    @staticmethod
    def sample(logits: Tensor, params: Sequence[Params], positions: Sequence[int]) -> list[int]:
        reqs = made_reqs(GenesisReq, GenesisParams, params, positions)
        return genesis_sampling.sample_tokens(reqs, logits)


class TestCudaGraphSampler(SamplerContract):
    stage = "v0.2"

    @staticmethod
    def sample(logits: Tensor, params: Sequence[Params], positions: Sequence[int]) -> list[int]:
        reqs = made_reqs(CudaGraphReq, CudaGraphParams, params, positions)
        return cudagraph_sampling.sample_tokens(reqs, logits)
