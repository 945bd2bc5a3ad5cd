"""The named parts of a Python file, and what of each must be equal for two stages to count as equal.

Pure functions on source text. A symbol is a function, a class, a method, or a module-level assignment; its
fingerprint is its syntax tree without docstrings and imports, so that a comment or a reworded docstring is
no difference, and a changed default or a renamed call is.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Symbol:
    """One named part: ``name`` is dotted for methods; lines are 1-based and inclusive, decorators included."""

    name: str
    first_line: int
    last_line: int
    fingerprint: str


@cache
def symbols(source: str) -> dict[str, Symbol]:
    """Every symbol of a file by name, in order. Of a class, the entry is all but its methods."""
    return {symbol.name: symbol for symbol in _symbols(ast.parse(source).body, prefix="")}


def _symbols(body: list[ast.stmt], prefix: str) -> Iterator[Symbol]:
    for node in body:
        if isinstance(node, Definition):
            yield _symbol(prefix + node.name, node)
            if isinstance(node, ast.ClassDef):
                yield from _symbols(node.body, f"{prefix}{node.name}.")
        elif not prefix:  # a class's own assignments count as the class
            for name in _assigned_names(node):
                yield _symbol(name, node)


def _symbol(name: str, node: ast.stmt) -> Symbol:
    decorators = node.decorator_list if isinstance(node, Definition) else []
    first_line = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return Symbol(name, first_line, node.end_lineno or node.lineno, fingerprint(node))


def _assigned_names(node: ast.stmt) -> list[str]:
    match node:
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case _:
            return []


def fingerprint(node: ast.stmt) -> str:
    """Hash of a node's syntax tree, docstrings and imports aside; of a class, its methods aside too."""
    if isinstance(node, ast.ClassDef):
        node = copy.copy(node)
        node.body = [part for part in node.body if not isinstance(part, Definition)]
    tree = copy.deepcopy(node)
    for part in ast.walk(tree):
        if isinstance(part, Definition):
            part.body = [line for line in part.body if not _is_silent(line)]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def _is_silent(node: ast.stmt) -> bool:
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_docstring or isinstance(node, ast.Import | ast.ImportFrom)
