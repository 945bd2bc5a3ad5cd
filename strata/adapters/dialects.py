"""What differs between the stages as seen from outside: packages, flags, keys. One entry per stage.

Read by tests, chat, tour and bench, so that none of them spells a stage's names itself. Imports no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..stages import TABLE

if TYPE_CHECKING:
    from .engine import Engine

STAGES = {stage.key: stage for stage in TABLE}


@dataclass(frozen=True)
class Dialect:
    """How to speak to one stage."""

    stage: str
    engine: str
    """``module:class`` of its `Engine`."""
    no_cache_flags: tuple[str, ...]
    no_cache_args: tuple[tuple[str, Any], ...]
    """The same as fields of ServerArgs."""
    policy_field: str
    policies: tuple[str, ...]
    attention_args: Mapping[str, Mapping[str, Any]]
    """For each attention path on a CUDA device, the fields of ServerArgs that choose it."""
    prompt_logprob_fields: tuple[str, str]
    """Request fields: whether the prompt is scored, and after which position."""
    logprob_prefixes: tuple[str, str] = ("", "")
    """What the names of lists of log probabilities begin with: the prompt's, the output's (v0.2 on)."""
    usage_in_every_chunk: bool = False
    """Whether streams of the OpenAI routes carry usage unasked."""
    warm_up_tokens: int = 0
    """Tokens that a server generates by itself before it takes requests."""
    roles: tuple[str, ...] = ("main", "router", "detokenizer")
    """Its processes when nothing is parallel."""
    graph_args: tuple[tuple[str, Any], ...] = ()
    """Fields of the stage's ServerArgs that make the CPU decode by replay."""
    no_graph_args: tuple[tuple[str, Any], ...] = ()
    """Fields that make a GPU decode without."""
    first_rank: int = 0
    """The first rank of tensor parallelism that has a process of its own beside ``roles``."""

    @property
    def package(self) -> str:
        return STAGES[self.stage].module

    @property
    def exists(self) -> bool:
        return STAGES[self.stage].exists

    @property
    def capabilities(self) -> frozenset[str]:
        return importlib.import_module(self.package).CAPABILITIES

    def roles_at(self, tp_size: int) -> tuple[str, ...]:
        """Its processes with ``tp_size`` ranks of tensor parallelism."""
        if tp_size == 1:
            return self.roles
        return (*self.roles, *(f"rank {rank}" for rank in range(self.first_rank, tp_size)))

    def path_args(self, path: str, device: str) -> dict[str, Any]:
        """ServerArgs of a bench path: an attention path, and after each ``+`` what is switched on or off.

        Raises ``KeyError`` for what the stage lacks on ``device``.
        """
        attention, *switches = path.split("+")
        known: dict[str, Any] = {"no-cache": self.no_cache_args}
        if device == "cpu":
            known |= {"graphs": self.graph_args} if self.graph_args else {}
            args = {"torch": dict[str, Any]()}[attention]
        else:
            known |= {"no-graphs": self.no_graph_args} if self.no_graph_args else {}
            args = dict(self.attention_args[attention])
        for switch in switches:
            args |= dict(known[switch])
        return args

    def make_engine(self, model_path: Path, **server_args: Any) -> Engine:
        """One engine in this process; with ``tp_size``, ``tp_rank`` and ``nccl_port`` one rank of it."""
        module, _, name = self.engine.partition(":")
        return getattr(importlib.import_module(module, __package__), name)(model_path, **server_args)


DIALECTS: dict[str, Dialect] = {
    dialect.stage: dialect
    for dialect in [
        Dialect(
            stage="v0.1",
            engine=".v0_1:GenesisEngine",
            no_cache_flags=("--model-mode", "no-cache"),
            no_cache_args=(("model_mode", ["no-cache"]),),
            policy_field="schedule_heuristic",
            policies=("lpm", "weight", "random", "fcfs"),
            attention_args={
                "triton": {},
                "flashinfer": {"model_mode": ["flashinfer"]},
                "torch": {"model_mode": ["torch"]},
            },
            prompt_logprob_fields=("return_normalized_logprob", "normalized_logprob_start_len"),
        ),
        Dialect(
            stage="v0.2",
            engine=".v0_2:CudaGraphEngine",
            no_cache_flags=("--disable-radix-cache",),
            no_cache_args=(("disable_radix_cache", True),),
            policy_field="schedule_heuristic",
            policies=("lpm", "random", "fcfs", "lof", "dfs-weight"),
            attention_args={
                "triton": {"disable_flashinfer": True},
                "flashinfer": {},
                "torch": {"enable_torch_attention": True},
            },
            prompt_logprob_fields=("return_logprob", "logprob_start_len"),
            logprob_prefixes=("prefill", "decode"),
            usage_in_every_chunk=True,
            warm_up_tokens=8,
            roles=("main", "controller", "detokenizer"),
            graph_args=(("enable_cpu_graph", True),),
            no_graph_args=(("disable_cuda_graph", True),),
            first_rank=1,
        ),
    ]
}


def existing_stages() -> list[str]:
    """The stages that are there, oldest first."""
    return [stage for stage, dialect in DIALECTS.items() if dialect.exists]
