"""What can't be frozen: calls that a replay could not repeat, found while they are recorded. No state."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .mode import Mode

HOST_READ = (
    "reads a tensor on the host: every replay would go on with the value of this run. "
    "Read it before the capture, or keep it in a tensor."
)
DATA_SHAPE = (
    "makes a tensor whose shape depends on data: every replay would take the shape of this run. "
    "Use torch.where, or say the size."
)
RANDOM = "draws random numbers: do that outside of the captured function."

HOST_TYPES = (torch.BoolType, torch.IntType, torch.FloatType, torch.NumberType)

NOT_THE_CALLER = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
"""Where the files are that a message should not point at."""


class CaptureError(RuntimeError):
    """The function can't be frozen: replays would not do what a plain run does."""


def call_site() -> str:
    """The line that called the op which is just being recorded."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_THE_CALLER):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"


def refuse(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise CaptureError for a call that a replay can't repeat."""
    problem = None
    if _returns_host_value(op):
        problem = HOST_READ
    elif _has_mask_as_index(op, args) or _has_shape_from_data(op, kwargs):
        problem = DATA_SHAPE
    elif not _look_inside(op, args, kwargs) and _draws_random_numbers(op, args, kwargs):
        problem = RANDOM
    if problem is not None:
        raise CaptureError(f"{op} ({call_site()}) {problem}")


def _returns_host_value(op: Any) -> bool:
    returns_number = any(isinstance(value.type, HOST_TYPES) for value in op._schema.returns)
    return returns_number or torch.Tag.data_dependent_output in op.tags


def _has_mask_as_index(op: Any, args: tuple[Any, ...]) -> bool:
    return any(
        isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
        for argument, value in zip(op._schema.arguments, args, strict=False)
        if argument.name == "indices" and isinstance(value, list | tuple)
        for index in value
    )


def _has_shape_from_data(op: Any, kwargs: dict[str, Any]) -> bool:
    """By the op's tag, which indexing has because of masks; where a size is given, it is no data."""
    is_indexing = any(argument.name == "indices" for argument in op._schema.arguments)
    has_tag = torch.Tag.dynamic_output_shape in op.tags
    return has_tag and not is_indexing and kwargs.get("output_size") is None


def _draws_random_numbers(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """By the op's tag, which attention has because of dropout: not if that is off, its default."""
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    is_off = "dropout_p" in names and given.get("dropout_p", 0.0) == 0.0
    return torch.Tag.nondeterministic_seeded in op.tags and not is_off


def _look_inside(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``op`` is made of other ops; if so, refuse those: in inference mode they go unseen.

    This runs them and drops what they compute.
    """
    if op.namespace != "aten" or op._schema.is_mutable:
        return False
    try:
        with _RefuseCalls():
            return op.decompose(*args, **kwargs) is not NotImplemented
    except CaptureError:
        raise
    except Exception:  # whatever is wrong with the call, running it will say
        return False


class _RefuseCalls(Mode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        refuse(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class RefuseHostReads(TorchFunctionMode):
    """Refuses reads of a tensor's memory that never reach the dispatcher.

    Args:
        is_exempt: whether an op is just running, which may read what it likes: it runs in replays too.
    """

    READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)

    def __init__(self, is_exempt: Callable[[], bool]) -> None:
        super().__init__()
        self._is_exempt = is_exempt

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self.READS and not self._is_exempt():
            raise CaptureError(f"Tensor.{func.__name__} ({call_site()}) {HOST_READ}")
        return func(*args, **(kwargs or {}))
