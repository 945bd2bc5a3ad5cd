"""Command line of the stage: flags with January's names and defaults, checked before anything starts."""

from __future__ import annotations

import argparse
import ipaddress
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self

MODEL_MODES = ("flashinfer", "torch", "no-cache")
SCHEDULE_HEURISTICS = ("lpm", "weight", "random", "fcfs")
MIN_TOTAL_TOKENS = 3
"""Slots of the smallest pool that can serve a request."""


def is_host_name(host: str) -> bool:
    """Whether ``host`` could be one: asking for the address of a text with an empty label, say, is an error."""
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def is_sendable_key(key: str) -> bool:
    """Whether a client can send it: what a header can't hold, or loses on the way, locks everybody out."""
    return bool(key) and key.isprintable() and key == key.strip()


@dataclass
class ServerArgs:
    """Everything a server is started with. All processes of a server share one copy."""

    model_path: str
    tokenizer_path: str = ""
    host: str = "127.0.0.1"
    port: int = 30000
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    context_length: int | None = None
    mem_fraction_static: float = 0.91
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    tp_size: int = 1
    model_mode: list[str] = field(default_factory=list)
    schedule_heuristic: str = "lpm"
    random_seed: int = 42
    api_key: str | None = field(default=None, repr=False)
    allow_remote_without_key: bool = False
    log_level: str = "info"
    disable_log_stats: bool = False

    def __post_init__(self) -> None:
        self.tokenizer_path = self.tokenizer_path or self.model_path

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def disable_radix_cache(self) -> bool:
        return "no-cache" in self.model_mode

    def public_dict(self) -> dict[str, Any]:
        """All arguments that may be shown to a client: everything but the key."""
        return {name: value for name, value in asdict(self).items() if name != "api_key"}

    def check(self) -> None:
        """Raise ``ValueError`` naming the flag for the first argument out of range."""
        if not is_host_name(self.host):
            raise ValueError(f"--host must be an address or the name of a host, got {self.host!r}.")
        if self.api_key is not None and not is_sendable_key(self.api_key):
            raise ValueError("--api-key must have a character, no line break, and no space at either end.")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port must be in [0, 65535], got {self.port}.")
        if self.tp_size < 1:
            raise ValueError(f"--tp-size must be at least 1, got {self.tp_size}.")
        if not 0.0 < self.mem_fraction_static < 1.0:
            raise ValueError(f"--mem-fraction-static must be in (0, 1), got {self.mem_fraction_static}.")
        if not -(2**63) <= self.random_seed < 2**63:
            raise ValueError(f"--random-seed must be a 64-bit integer, got {self.random_seed}.")
        # A prompt's token needs a token after it, and admission keeps one slot of the pool free.
        least = {"context_length": 2, "max_total_tokens": MIN_TOTAL_TOKENS}
        for name in ("context_length", "max_total_tokens", "max_running_requests"):
            value = getattr(self, name)
            if value is not None and value < least.get(name, 1):
                raise ValueError(
                    f"--{name.replace('_', '-')} must be at least {least.get(name, 1)}, got {value}."
                )
        if {"torch", "flashinfer"} <= set(self.model_mode):
            raise ValueError("--model-mode takes torch or flashinfer, not both.")
        self._check_bind()

    def _check_bind(self) -> None:
        try:
            is_loopback = ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            is_loopback = self.host == "localhost"
        if not (is_loopback or self.api_key or self.allow_remote_without_key):
            raise ValueError(
                f"--host {self.host} is reachable from other machines: set --api-key, or pass "
                "--allow-remote-without-key if anyone may use this server."
            )

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Add one flag per field; help texts state what the default means."""
        add = parser.add_argument
        add(
            "--model-path",
            required=True,
            help="folder of a Hugging Face model: config.json, tokenizer.json, *.safetensors",
        )
        add("--tokenizer-path", default="", help="folder of the tokenizer (default: the model's)")
        add("--host", default=ServerArgs.host, help="address to bind (default: %(default)s)")
        add(
            "--port",
            type=int,
            default=ServerArgs.port,
            help="port to bind; 0 takes a free one (default: %(default)s)",
        )
        add(
            "--load-format",
            default="auto",
            choices=["auto", "safetensors", "dummy"],
            help="dummy fills the weights with seeded random numbers: for benches, needs no weight files",
        )
        add(
            "--device",
            default="auto",
            choices=["auto", "cpu", "cuda"],
            help="auto takes CUDA where there is a device",
        )
        add(
            "--dtype",
            default="auto",
            choices=["auto", "float32", "bfloat16", "float16"],
            help="of weights and KV cache (auto: float32 on the CPU, else what the checkpoint says)",
        )
        add(
            "--context-length",
            type=int,
            help="longest prompt plus output (default: what the model's config says)",
        )
        add(
            "--mem-fraction-static",
            type=float,
            default=ServerArgs.mem_fraction_static,
            help="share of the GPU's memory for weights and token pool (default: %(default)s)",
        )
        add(
            "--max-total-tokens",
            type=int,
            help="slots of the token pool (default: on a GPU what --mem-fraction-static leaves; on the CPU 32768, "
            "or what fits into 20%% of memory if that is less)",
        )
        add(
            "--max-running-requests",
            type=int,
            help="most requests decoding at once (default: half of the pool's slots)",
        )
        add("--tp-size", type=int, default=1, help="ranks of tensor parallelism (default: %(default)s)")
        add(
            "--model-mode",
            nargs="+",
            default=[],
            choices=MODEL_MODES,
            help="flashinfer or torch choose those attention kernels; no-cache turns the radix cache off",
        )
        add(
            "--schedule-heuristic",
            default="lpm",
            choices=SCHEDULE_HEURISTICS,
            help="order of the waiting requests: longest prefix match, subtree weight, random, or arrival",
        )
        add(
            "--random-seed",
            type=int,
            default=ServerArgs.random_seed,
            help="seed of unseeded sampling (default: %(default)s)",
        )
        add("--api-key", help="requests must carry 'Authorization: Bearer KEY'")
        add(
            "--allow-remote-without-key",
            action="store_true",
            help="bind a non-loopback address without --api-key",
        )
        add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
        add("--disable-log-stats", action="store_true", help="print no statistics lines")

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        return cls(**{f.name: getattr(args, f.name) for f in fields(cls)})


@dataclass
class PortArgs:
    """Where the processes of one server meet: private ipc endpoints, and a TCP port for the ranks.

    The router derives the endpoints of its ranks from its own.
    """

    router_endpoint: str
    detokenizer_endpoint: str
    tokenizer_endpoint: str
    nccl_port: int
