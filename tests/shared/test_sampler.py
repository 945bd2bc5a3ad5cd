"""The sampler of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from stages.v0_1_genesis.managers.router import infer_batch as genesis
from stages.v0_1_genesis.memory_pool import ReqToTokenPool, TokenToKVPool
from stages.v0_1_genesis.sampling_params import SamplingParams as GenesisParams
from stages.v0_1_genesis.support.staging import StagingBuffer

from .contracts.sampler import Params, SamplerContract

CPU = torch.device("cpu")
NO_TOKENIZER = SimpleNamespace(eos_token_ids=frozenset())


def genesis_batch(reqs: list[genesis.Req]) -> genesis.Batch:
    """A batch that can do nothing but sample."""
    rows, slots = ReqToTokenPool(1, 1, CPU), TokenToKVPool(1, torch.float32, 1, 1, 1, CPU)
    return genesis.Batch(reqs, rows, slots, cast(Any, None), StagingBuffer(CPU, torch.int64))


class TestGenesisSampler(SamplerContract):
    stage = "v0.1"

    @staticmethod
    def sample(logits: Tensor, params: Sequence[Params], positions: Sequence[int]) -> list[int]:
        reqs = []
        for row, (fields, position) in enumerate(zip(params, positions, strict=True)):
            sampling = msgspec.convert(dict(fields), GenesisParams)
            req = genesis.Req(f"r{row}", [1], sampling, False, cast(Any, NO_TOKENIZER))
            req.output_ids = [0] * position
            reqs.append(req)
        return genesis_batch(reqs).sample(logits)
