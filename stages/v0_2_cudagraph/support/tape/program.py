"""What a tape has recorded: calls in their order, and how their tensors hang together.

A `Program` is made by `recorder` and read by `source` and `check`; it lives while a tape is captured. It
holds no temporaries: they are known by number, shape and strides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fixed:
    """A tensor that was there before the recording, or a view of one: ``Program.fixed[index]``."""

    index: int

    def __str__(self) -> str:
        return f"fixed tensor {self.index}"


@dataclass(frozen=True)
class Temp:
    """A view of a temporary: which of the buffers that calls made, and how it lies in there.

    ``kind`` is what other strides can't change: dtype, whether conjugated, whether negated.
    """

    buffer: int
    kind: tuple[torch.dtype, bool, bool]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def __str__(self) -> str:
        return f"a view {[*self.size]} of temporary {self.buffer}"

    @property
    def whole(self) -> tuple[int, tuple[torch.dtype, bool, bool]]:
        """What it can be cut from."""
        return self.buffer, self.kind


@dataclass(frozen=True)
class Host:
    """An object of the host's that is not compared, such as a process group, and its name in the source."""

    value: Any = field(compare=False)
    name: str = "host"


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that the function made of host data; every replay starts from a copy of it."""

    value: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and same_bits(self.value, other.value)


@dataclass(frozen=True)
class Call:
    """One call of ``op``. Tensors in ``args`` and ``kwargs`` are `Fixed`, `Temp` or `Constant`."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: dict[tuple[int, ...], Temp]
    """The buffers that the call makes, by their place in what the op returns: () for the only tensor, (1,) for
    the second of several."""
    writes: tuple[Fixed | Temp, ...]
    function: Callable[..., Any] = field(compare=False)
    """What a replay calls: ``op``, or a faster way to it."""
    site: str = field(compare=False)
    """The line that called it."""

    def __str__(self) -> str:
        return f"{self.op} ({self.site})"

    @property
    def name(self) -> str:
        """A short name for the generated source."""
        namespace, _, name = self.op.name().partition("::")
        name = name.split(".")[0]
        return name if namespace == "aten" else f"{namespace}_{name}"

    @property
    def is_pure(self) -> bool:
        """Whether the call is for nothing when nobody uses its results."""
        opaque = self.op.namespace != "aten" or torch.Tag.maybe_aliasing_or_mutating in self.op.tags
        return bool(self.results) and not self.writes and not opaque


@dataclass
class Program:
    """A recorded run. ``outputs`` is what the function returned, with `Fixed` and `Temp` for tensors."""

    calls: list[Call]
    fixed: list[Tensor]
    outputs: Any


def leaves(value: Any) -> Iterator[Any]:
    """What stands in nested lists, tuples, dicts and dataclasses (references count as one thing)."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif _is_structure(value):
        for entry in dataclasses.fields(value):
            yield from leaves(getattr(value, entry.name))
    else:
        yield value


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to each of its `leaves`."""
    if isinstance(value, list | tuple):
        items = [map_leaves(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: map_leaves(function, item) for key, item in value.items()}
    if _is_structure(value):
        names = [entry.name for entry in dataclasses.fields(value)]
        return dataclasses.replace(
            value, **{name: map_leaves(function, getattr(value, name)) for name in names}
        )
    return function(value)


def _is_structure(value: Any) -> bool:
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and not isinstance(value, Fixed | Temp | Constant | Host)
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether shape, dtype and every bit agree, also where both are NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return torch.equal(a.resolve_conj().view(bits), b.resolve_conj().view(bits))
