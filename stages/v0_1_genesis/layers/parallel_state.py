"""The tensor-parallel group of this process: how many ranks share the model, and their collectives.

One per rank process, set up by ModelRunner before the model is built and alive until the process ends.
With one rank nothing is set up and the collectives return what they are given.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def initialize_model_parallel(tp_size: int, tp_rank: int, port: int, device: torch.device) -> None:
    """Join the group of ``tp_size`` ranks that meet at TCP ``port`` of this machine; waits for all."""
    if tp_size == 1:
        return
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        world_size=tp_size,
        rank=tp_rank,
    )


def destroy_model_parallel() -> None:
    """Leave the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


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
    dist.all_gather_into_tensor(parts, x.contiguous())
    return parts.transpose(0, 1).flatten(1)


def tensor_model_parallel_min(value: int, device: torch.device) -> int:
    """The smallest of every rank's ``value``."""
    if not dist.is_initialized():
        return value
    smallest = torch.tensor([value], device=device)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return int(smallest)
