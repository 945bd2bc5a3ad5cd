"""The tensor-parallel group of this process: how many ranks share the model, and their collectives.

One per rank process, set up by ModelRunner before the model is built and alive until the process ends.
With one rank nothing is set up and the collectives return what they are given.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..network import interface_towards, listen

_cpu_group: dist.ProcessGroup | None = None
"""The ranks once more, over gloo: for what is on the host and must not wait for the device."""

# torch renamed it; both of its names serve the versions that this stage runs on.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def initialize_model_parallel(
    tp_size: int, tp_rank: int, address: tuple[str, int], device: torch.device
) -> None:
    """Join the group of ``tp_size`` ranks that meet at ``address``, a host and a TCP port; waits for all.

    Gloo listens on no other interface than the one that leads there: with all ranks on one machine, the
    loopback. A process is a member for good: a second model in it shares the group.
    """
    if tp_size == 1 or dist.is_initialized():
        return
    if (interface := interface_towards(address[0])) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=_meeting_point(tp_size, tp_rank, address),
        world_size=tp_size,
        rank=tp_rank,
        device_id=device if device.type == "cuda" else None,  # NCCL connects now, not in the first request
    )
    global _cpu_group
    _cpu_group = dist.new_group(backend="gloo")


def _meeting_point(tp_size: int, tp_rank: int, address: tuple[str, int]) -> TCPStore:
    """Where the ranks find each other; rank 0 serves it."""
    if tp_rank != 0:
        return TCPStore(*address, tp_size, is_master=False)
    # Left to itself the store would listen on every interface.
    listener = listen(address)
    return TCPStore(
        *address,
        tp_size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def destroy_model_parallel() -> None:
    """Leave the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def broadcast_bytes(data: bytes) -> bytes:
    """Rank 0's ``data`` on every rank: its size first, then the bytes if there are any, over the CPU group."""
    size = torch.tensor([len(data)])
    dist.broadcast(size, src=0, group=_cpu_group)
    if not size:
        return b""
    payload = torch.empty(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(payload, src=0, group=_cpu_group)
    return payload.numpy().tobytes()


def get_tensor_model_parallel_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def get_tensor_model_parallel_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def tensor_model_parallel_all_reduce(x: Tensor) -> Tensor:
    """The sum of every rank's ``x``, in place."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def tensor_model_parallel_all_gather(x: Tensor) -> Tensor:
    """Every rank's ``x`` ``[tokens, n]`` side by side in rank order: ``[tokens, tp_size * n]``."""
    if not dist.is_initialized():
        return x
    parts = x.new_empty((dist.get_world_size(), *x.shape))
    all_gather_single(parts.flatten(0, 1), x.contiguous())
    return parts.transpose(0, 1).flatten(1)


def tensor_model_parallel_broadcast(x: Tensor) -> Tensor:
    """Rank 0's ``x``, in place: for what every rank computes and all must agree on to the last bit."""
    if dist.is_initialized():
        dist.broadcast(x, src=0)
    return x


def tensor_model_parallel_min(value: int, device: torch.device) -> int:
    """The smallest of every rank's ``value``."""
    if not dist.is_initialized():
        return value
    smallest = torch.tensor([value], device=device)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return int(smallest)
