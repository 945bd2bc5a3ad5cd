"""Command line of the stage: flags with July's names and defaults, checked before anything starts."""

from __future__ import annotations

import argparse
import ipaddress
import math
import random
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, Self

SCHEDULE_HEURISTICS = ("lpm", "random", "fcfs", "lof", "dfs-weight")
LOAD_BALANCE_METHODS = ("round_robin", "shortest_queue")
MIN_TOTAL_TOKENS = 3
"""Slots of the smallest pool that can serve a request."""
MEM_FRACTION_STATIC = {1: 0.89, 2: 0.88, 4: 0.86, 8: 0.84, 16: 0.80}
"""Default share of the GPU's memory by tp_size: the more ranks, the more buffers for their collectives."""


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
    chat_template: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    context_length: int | None = None
    mem_fraction_static: float = None  # type: ignore[assignment]  # by tp_size: a float once constructed
    max_total_tokens: int | None = None
    max_prefill_tokens: int | None = None
    max_running_requests: int | None = None
    schedule_heuristic: str = "lpm"
    schedule_conservativeness: float = 1.0
    tp_size: int = 1
    dp_size: int = 1
    load_balance_method: str = "round_robin"
    nccl_init_addr: str | None = None
    nnodes: int = 1
    node_rank: int | None = None
    dist_timeout: int = 300
    stream_interval: int = 1
    random_seed: int = field(default_factory=lambda: random.randint(0, 2**30))  # one draw for all processes
    disable_flashinfer: bool = False
    enable_torch_attention: bool = False
    disable_radix_cache: bool = False
    disable_regex_jump_forward: bool = False
    disable_cuda_graph: bool = False
    enable_cpu_graph: bool = False
    enable_torch_compile: bool = False
    debug_retract_every: int = 0
    api_key: str | None = field(default=None, repr=False)
    allow_remote_without_key: bool = False
    log_level: str = "info"
    disable_log_stats: bool = False

    def __post_init__(self) -> None:
        self.tokenizer_path = self.tokenizer_path or self.model_path
        if self.mem_fraction_static is None:
            # A size that is not listed takes the share of the next larger one.
            shares = [share for size, share in MEM_FRACTION_STATIC.items() if size >= self.tp_size]
            self.mem_fraction_static = shares[0] if shares else min(MEM_FRACTION_STATIC.values())

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def node_address(self) -> tuple[str, int] | None:
        """Host and port at which several nodes meet; None with one node. ``ValueError`` if they can't be read."""
        if self.nccl_init_addr is None:
            return None
        host, _, port = self.nccl_init_addr.rpartition(":")
        if not is_host_name(host) or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(
                f"--nccl-init-addr must be HOST:PORT, as in 10.0.0.1:5000, got {self.nccl_init_addr}."
            )
        return host.removeprefix("[").removesuffix("]"), int(port)

    @property
    def node_ranks(self) -> range:
        """The ranks of tensor parallelism that run on this node."""
        num_ranks = self.tp_size // self.nnodes
        first = (self.node_rank or 0) * num_ranks
        return range(first, first + num_ranks)

    @property
    def ranks_per_node(self) -> int:
        """How many rank processes, of all replicas, share this machine."""
        return self.dp_size * len(self.node_ranks)

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
        if self.dp_size < 1:
            raise ValueError(f"--dp-size must be at least 1, got {self.dp_size}.")
        self._check_nodes()
        if not 0.0 < self.mem_fraction_static < 1.0:
            raise ValueError(f"--mem-fraction-static must be in (0, 1), got {self.mem_fraction_static}.")
        if not -(2**63) <= self.random_seed < 2**63:
            raise ValueError(f"--random-seed must be a 64-bit integer, got {self.random_seed}.")
        # A prompt's token needs a token after it, and admission keeps one slot of the pool free.
        least = {"context_length": 2, "max_total_tokens": MIN_TOTAL_TOKENS}
        for name in ("context_length", "max_total_tokens", "max_prefill_tokens", "max_running_requests"):
            value = getattr(self, name)
            if value is not None and value < least.get(name, 1):
                raise ValueError(
                    f"--{name.replace('_', '-')} must be at least {least.get(name, 1)}, got {value}."
                )
        if not (math.isfinite(self.schedule_conservativeness) and self.schedule_conservativeness > 0.0):
            raise ValueError(
                f"--schedule-conservativeness must be a finite number above 0, got {self.schedule_conservativeness}."
            )
        if self.stream_interval < 1:
            raise ValueError(f"--stream-interval must be at least 1, got {self.stream_interval}.")
        if self.debug_retract_every < 0:
            raise ValueError(f"--debug-retract-every must be at least 0, got {self.debug_retract_every}.")
        if not self.node_rank:  # the other nodes serve no HTTP
            self._check_bind()

    def _check_nodes(self) -> None:
        if self.nnodes < 1:
            raise ValueError(f"--nnodes must be at least 1, got {self.nnodes}.")
        if self.dist_timeout < 1:
            raise ValueError(f"--dist-timeout must be at least 1, got {self.dist_timeout}.")
        if self.nnodes == 1:
            if self.nccl_init_addr is not None or self.node_rank:
                raise ValueError("--nccl-init-addr and --node-rank are for several nodes: pass --nnodes too.")
            return
        if self.node_address is None or self.node_rank is None:
            raise ValueError(
                f"--nnodes {self.nnodes} needs --node-rank and, on every node, the same --nccl-init-addr "
                "HOST:PORT: an address of node 0 that the others can reach."
            )
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"--node-rank must be in [0, {self.nnodes - 1}], got {self.node_rank}.")
        if self.tp_size % self.nnodes:
            raise ValueError(
                f"--tp-size {self.tp_size} must be a multiple of --nnodes {self.nnodes}: "
                "every node runs as many ranks as the others."
            )
        if self.dp_size > 1:
            raise ValueError(
                f"--dp-size {self.dp_size} can't be had with --nnodes {self.nnodes}: "
                "all replicas of a server are on one node. Start a server on each node instead."
            )

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
        add("--chat-template", help="file with a Jinja template for chats (default: the model's own)")
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
            help="share of the GPU's memory for weights and token pool (default: 0.89, less with more ranks)",
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
        add(
            "--max-prefill-tokens",
            type=int,
            help="new tokens of one prefill batch (default: 16384)",
        )
        add(
            "--schedule-heuristic",
            default="lpm",
            choices=SCHEDULE_HEURISTICS,
            help="order of the waiting requests: longest prefix match, random, arrival, longest output, "
            "or subtree weight",
        )
        add(
            "--schedule-conservativeness",
            type=float,
            default=ServerArgs.schedule_conservativeness,
            help="raise it if requests are retracted often: admission then expects longer outputs "
            "(default: %(default)s)",
        )
        add("--tp-size", type=int, default=1, help="ranks of tensor parallelism (default: %(default)s)")
        add(
            "--dp-size",
            type=int,
            default=1,
            help="replicas of the model, each with --tp-size ranks and a token pool of its own (default: %(default)s)",
        )
        add(
            "--load-balance-method",
            default=ServerArgs.load_balance_method,
            choices=LOAD_BALANCE_METHODS,
            help="which replica gets a request: the next in turn, or the one with the fewest in flight "
            "(default: %(default)s)",
        )
        add(
            "--nccl-init-addr",
            help="HOST:PORT of node 0, where the nodes of one server meet; for a network that you trust",
        )
        add(
            "--nnodes",
            type=int,
            default=1,
            help="machines that share the ranks evenly; start this command on each (default: %(default)s)",
        )
        add("--node-rank", type=int, help="which of the nodes this one is; node 0 serves HTTP")
        add(
            "--dist-timeout",
            type=int,
            default=ServerArgs.dist_timeout,
            help="seconds for which a node waits for the others to come (default: %(default)s)",
        )
        add(
            "--stream-interval",
            type=int,
            default=ServerArgs.stream_interval,
            help="a stream hears of every so many tokens (default: %(default)s)",
        )
        add("--random-seed", type=int, help="seed of unseeded sampling (default: drawn at random)")
        add(
            "--disable-flashinfer",
            action="store_true",
            help="on a GPU, attention by the Triton kernels, and no CUDA graphs",
        )
        add("--enable-torch-attention", action="store_true", help="on a GPU, attention in plain torch")
        add("--disable-radix-cache", action="store_true", help="share no prefixes")
        add(
            "--disable-regex-jump-forward",
            action="store_true",
            help="generate also the text that a regex leaves no choice about; implied by --disable-radix-cache, "
            "without which a jump would compute the whole prompt again",
        )
        add("--disable-cuda-graph", action="store_true", help="launch every decode kernel by itself")
        add(
            "--enable-cpu-graph",
            action="store_true",
            help="on the CPU, decode by replaying recorded tapes, as a GPU replays CUDA graphs",
        )
        add("--enable-torch-compile", action="store_true", help="compile the model for small decode batches")
        add(
            "--debug-retract-every",
            type=int,
            default=0,
            help="force a retraction every so many decode steps (default: 0, never)",
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
        given = {f.name: getattr(args, f.name) for f in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})


@dataclass
class PortArgs:
    """Where the processes of one server meet: private ipc endpoints, and a TCP port for each replica's ranks."""

    controller_endpoint: str
    detokenizer_endpoint: str
    tokenizer_endpoint: str
    nccl_ports: list[int]

    def of_replica(self, dp_rank: int) -> PortArgs:
        """The same for one of several replicas: what it has to say goes to the controller of them all."""
        return replace(
            self,
            controller_endpoint=f"{self.controller_endpoint}-{dp_rank}",
            detokenizer_endpoint=self.controller_endpoint,
        )
