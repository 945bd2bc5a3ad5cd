"""From a recorded program to a Python function: a line per call, temporaries in local variables.

A temporary is deleted right after its last use. Views are no calls: those of fixed tensors exist already,
and those of a temporary are cut from it by ``as_strided`` where a call needs one, however many steps led to
them. Calls whose results nobody needs are left out.
"""

from __future__ import annotations

import itertools
import linecache
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .program import Call, Constant, Fixed, Host, Program, Temp, leaves

Probe = Callable[[int, list[Tensor]], None]

_tape_numbers = itertools.count()


@dataclass(frozen=True)
class Line:
    """A statement, and which variables of the function it names."""

    text: str
    variables: tuple[str, ...]


class Source:
    """A program written as a function without arguments: `text` is its source, `compile` makes it.

    Args:
        program: what to write.
        copies: pairs of an output that is a temporary and the static tensor that gets it.
        probe: called after every call with its position and the temporaries that it made and wrote.
    """

    def __init__(
        self, program: Program, copies: list[tuple[Temp, Tensor]], probe: Probe | None = None
    ) -> None:
        self._globals: dict[str, Any] = {f"f{i}": tensor for i, tensor in enumerate(program.fixed)}
        self._lines: list[Line] = []
        self._variables: dict[Temp, str] = {}
        self._whole: dict[Any, Temp] = {}
        needed = {temp.whole for temp, _ in copies}
        for index in _needed_calls(program, needed):
            call = program.calls[index]
            if probe is None:
                made = {place: temp for place, temp in call.results.items() if temp.whole in needed}
                self._write_call(index, call, made)
            else:
                self._write_call(index, call, call.results)
                changed = [*call.results.values(), *(ref for ref in call.writes if isinstance(ref, Temp))]
                self._write_statement("probe", probe, index, changed)
        for temp, static in copies:
            self._write_statement("copy_", Tensor.copy_, Host(static, "out"), temp)

    @property
    def text(self) -> str:
        last_use = {name: i for i, line in enumerate(self._lines) for name in line.variables}
        statements = []
        for i, line in enumerate(self._lines):
            dead = sorted({name for name in line.variables if last_use[name] == i})
            statements.append(f"    {line.text}" + (f"; del {', '.join(dead)}" if dead else ""))
        return "\n".join(["def replay():", *statements, "    return None", ""])

    def compile(self) -> Callable[[], None]:
        text, name = self.text, f"<tape {next(_tape_numbers)}>"
        exec(compile(text, name, "exec"), self._globals)  # nothing but our own names and literals
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        function: Callable[[], None] = self._globals["replay"]
        return function

    # -- statements --------------------------------------------------------------------------------------

    def _write_call(self, index: int, call: Call, made: dict[tuple[int, ...], Temp]) -> None:
        variables: list[str] = []
        arguments = [self._expression(arg, variables) for arg in call.args]
        arguments += [f"{name}={self._expression(arg, variables)}" for name, arg in call.kwargs.items()]
        text = f"{self._global(call.name, call.function)}({', '.join(arguments)})"
        if not made:
            self._write(text, *variables)
        elif () in made:
            name = self._variable_of_whole(made[()])
            self._write(f"{name} = {text}", name, *variables)
        else:
            self._write(f"r{index} = {text}", f"r{index}", *variables)
            for place, temp in made.items():
                name = self._variable_of_whole(temp)
                items = "".join(f"[{position}]" for position in place)
                self._write(f"{name} = r{index}{items}", name, f"r{index}")

    def _write_statement(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        variables: list[str] = []
        arguments = ", ".join(self._expression(arg, variables) for arg in args)
        self._write(f"{self._global(name, function)}({arguments})", *variables)

    def _write(self, text: str, *variables: str) -> None:
        self._lines.append(Line(text, variables))

    # -- names -------------------------------------------------------------------------------------------

    def _expression(self, value: Any, variables: list[str]) -> str:
        """``value`` as Python; the variables in it are added to ``variables``."""
        if isinstance(value, Temp):
            variables.append(self._variable(value))
            return variables[-1]
        if isinstance(value, Fixed):
            return f"f{value.index}"
        if isinstance(value, list):
            return f"[{', '.join(self._expression(item, variables) for item in value)}]"
        if isinstance(value, tuple):
            return f"({''.join(f'{self._expression(item, variables)}, ' for item in value)})"
        if value is None or isinstance(value, bool | int | str) or _is_finite(value):
            return repr(value)
        if isinstance(value, Host):
            return self._global(value.name, value.value)
        if isinstance(value, torch.dtype):
            return self._global(str(value).removeprefix("torch."), value)
        return self._global("constant", value.value if isinstance(value, Constant) else value)

    def _variable(self, temp: Temp) -> str:
        """The variable of a view of a temporary: the first use cuts it from the whole."""
        if temp not in self._variables:
            whole = self._variables[self._whole[temp.whole]]
            name = f"{whole}_{len(self._variables)}"
            cut = self._global("as_strided", torch.as_strided)
            self._write(f"{name} = {cut}({whole}, {temp.size}, {temp.stride}, {temp.offset})", name, whole)
            self._variables[temp] = name
        return self._variables[temp]

    def _variable_of_whole(self, temp: Temp) -> str:
        """The variable of a new buffer, or of an old one seen as another dtype."""
        self._whole[temp.whole] = temp
        self._variables[temp] = f"t{len(self._variables)}"
        return self._variables[temp]

    def _global(self, name: str, value: Any) -> str:
        """The global name of ``value``: ``name``, numbered where that stands for something else."""
        for candidate in itertools.chain([name], (f"{name}_{i}" for i in itertools.count(2))):
            if self._globals.setdefault(candidate, value) is value:
                return candidate
        raise AssertionError("unreachable")


def _needed_calls(program: Program, needed: set[Any]) -> list[int]:
    """Positions of the calls that have an effect or serve one; adds the temporaries they read to ``needed``."""
    kept = []
    for index in reversed(range(len(program.calls))):
        call = program.calls[index]
        if not call.is_pure or any(temp.whole in needed for temp in call.results.values()):
            kept.append(index)
            needed.update(leaf.whole for leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, Temp))
    return kept[::-1]


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)
