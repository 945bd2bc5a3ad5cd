"""Records a run of a function as a `Program`, at torch's dispatcher: below all of its Python.

A `Recorder` lives for one run. It refuses calls that hand values of tensors to the host, because what the
host does with them is not in the program: replays would keep what they were in this run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .bindings import fast_way
from .mode import Mode
from .program import Call, Constant, Fixed, Host, Program, Temp, leaves, map_leaves
from .refusals import CaptureError, RefuseHostReads, call_site, refuse

T = TypeVar("T")


class Watcher:
    """Sees the tensors of a recording, which its program does not keep."""

    def before_call(self, call: Call, args: tuple[Any, ...], fixed: list[Tensor]) -> None:
        """``args`` are the call's, ``fixed`` those of them that it writes, unless it fails."""

    def after_call(self, index: int, changed: list[Tensor]) -> None:
        """``changed`` are the temporaries that the call at position ``index`` made, then those it wrote."""


class Recorder(Mode):
    """Records one run.

    Args:
        earlier: a program of the same function; fixed tensors that it knows keep their numbers.
        watcher: sees the tensors.
    """

    def __init__(self, earlier: Program | None = None, watcher: Watcher | None = None) -> None:
        super().__init__()
        self._watcher = watcher or Watcher()
        self._calls: list[Call] = []
        self._fixed: list[Tensor] = []
        self._fixed_numbers: dict[Any, int] = {}
        self._fixed_storages: set[int] = set()
        self._buffers: dict[int, int] = {}
        self._wholes: set[Any] = set()
        self._storages: list[StorageWeakRef] = []
        self._is_inside_call = False
        for tensor in earlier.fixed if earlier else ():
            self._add_fixed(tensor)

    def record(self, fn: Callable[[], T]) -> tuple[T, Program]:
        """Run ``fn`` and return what it returned, and the program of it."""
        with RefuseHostReads(lambda: self._is_inside_call), self:
            outputs = fn()
        return outputs, Program(self._calls, self._fixed, map_leaves(self._reference, outputs))

    # -- calls -------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._is_inside_call = True
        try:
            return self._call(func, args, kwargs or {})
        finally:
            self._is_inside_call = False

    def _call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refuse(op, args, kwargs)
        if op is torch.ops.aten.lift_fresh.default and not self._is_known(args[0]):
            return self._make_constant(args[0])
        written = _written(op, args, kwargs)
        call = Call(
            op=op,
            args=map_leaves(self._reference, args),
            kwargs=map_leaves(self._reference, kwargs),
            results={},
            writes=tuple(self._reference(tensor) for tensor in written),
            function=fast_way(op, args, kwargs),
            site=call_site(),
        )
        pairs = list(zip(written, call.writes, strict=True))
        fixed = [tensor for tensor, reference in pairs if isinstance(reference, Fixed)]
        temps = [tensor for tensor, reference in pairs if isinstance(reference, Temp)]
        self._watcher.before_call(call, args, fixed)
        memory = [*map(_storage, written), *map(_view, fixed)]
        returned = op(*args, **kwargs)
        if memory != [*map(_storage, written), *map(_view, fixed)]:
            raise CaptureError(f"{call} gives a tensor other memory, or a fixed tensor another shape")
        made = self._find_results(call, returned, ())
        if not _is_view(call, returned):
            self._watcher.after_call(len(self._calls), made + temps)
            self._calls.append(call)
        return returned

    def _make_constant(self, tensor: Tensor) -> Tensor:
        """The function made a tensor of host data: as much a result as others, from a copy that stays."""
        constant = Constant(tensor.clone())
        clone = torch.ops.aten.clone.default
        call = Call(clone, (constant,), {}, {}, (), torch.clone, call_site())
        made = self._find_results(call, tensor, ())
        self._watcher.after_call(len(self._calls), made)
        self._calls.append(call)
        return tensor

    def _find_results(self, call: Call, returned: Any, place: tuple[int, ...]) -> list[Tensor]:
        """Give numbers to the new buffers in what a call returned, and list them."""
        if isinstance(returned, list | tuple):
            made = [self._find_results(call, item, (*place, i)) for i, item in enumerate(returned)]
            return [tensor for tensors in made for tensor in tensors]
        if not isinstance(returned, Tensor):
            return []
        if returned.layout is not torch.strided:
            raise CaptureError(f"{call} makes a tensor of layout {returned.layout}")
        reference = StorageWeakRef(returned.untyped_storage())
        if reference.cdata in self._fixed_storages:
            return []
        if reference.cdata not in self._buffers:
            self._buffers[reference.cdata] = len(self._buffers)
            self._storages.append(reference)  # so that no other storage can come to this address
        temp = self._reference(returned)
        if temp.whole in self._wholes:
            return []
        self._wholes.add(temp.whole)
        call.results[place] = temp
        return [returned]

    # -- tensors -----------------------------------------------------------------------------------------

    def _is_known(self, tensor: Tensor) -> bool:
        address = StorageWeakRef(tensor.untyped_storage()).cdata
        return address in self._buffers or address in self._fixed_storages

    def _reference(self, value: Any) -> Any:
        """What stands for ``value`` in a program."""
        if isinstance(value, torch.ScriptObject):
            return Host(value)
        if not isinstance(value, Tensor):
            return math.nan if value != value else value  # one NaN, so that programs can be compared
        if id(value) in self._fixed_numbers:
            return Fixed(self._fixed_numbers[id(value)])
        view = _view(value)
        if view is not None and view[0] in self._buffers:
            return Temp(self._buffers[view[0]], *view[1:])
        if view not in self._fixed_numbers:
            self._add_fixed(value)
            return Fixed(len(self._fixed) - 1)
        return Fixed(self._fixed_numbers[view])

    def _add_fixed(self, tensor: Tensor) -> None:
        """Number a fixed tensor; it is known again as the same object, or as the same view of a storage."""
        number, view = len(self._fixed), _view(tensor)
        self._fixed.append(tensor)
        self._fixed_numbers[id(tensor)] = number
        if view is not None:
            self._fixed_numbers.setdefault(view, number)
            self._fixed_storages.add(view[0])


def _view(tensor: Tensor) -> tuple[Any, ...] | None:
    """Address of the storage, and how the tensor lies in it; None for oneDNN's packed tensors."""
    if tensor.layout is not torch.strided:
        return None
    return (
        StorageWeakRef(tensor.untyped_storage()).cdata,
        (tensor.dtype, tensor.is_conj(), tensor.is_neg()),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
    )


def _storage(tensor: Tensor) -> tuple[int, int] | None:
    """Address and size of the storage."""
    if tensor.layout is not torch.strided:
        return None
    storage = tensor.untyped_storage()
    return StorageWeakRef(storage).cdata, storage.nbytes()


def _is_view(call: Call, returned: Any) -> bool:
    """Whether a call did nothing but make other views of tensors it got."""
    if torch.Tag.inplace_view in call.op.tags:
        return True
    returns_tensor = any(isinstance(leaf, Tensor) for leaf in leaves(returned))
    return call.op.namespace == "aten" and returns_tensor and not call.results and not call.writes


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call may write, by its schema (which collectives leave out)."""
    values: list[Any] = []
    for i, argument in enumerate(op._schema.arguments):
        info = argument.alias_info
        if op.namespace == "c10d" or (info is not None and info.is_write):
            values.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in leaves(values) if isinstance(leaf, Tensor)]
