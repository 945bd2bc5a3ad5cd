"""Rules that every stage's source keeps (DESIGN §1, §8, §10), read from the syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.adapters.dialects import STAGES

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "transformers", "rpyc"}
FORBIDDEN_NAMES = {"recv_pyobj", "send_pyobj", "broadcast_object_list", "all_gather_object", "eval", "exec"}
COMPILES = "support/tape/"
"""The CPU's stand-in for CUDA graphs turns recorded calls into Python source, its own and nobody else's."""
MAX_LINES = 450
"""A wall; the aim is 400 (DESIGN §10)."""


def folder_of(stage: str) -> Path:
    return STAGES[stage].folder


def sources(stage: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(folder_of(stage).rglob("*.py")):
        yield path, ast.parse(path.read_text())


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(level, module) of every import; level 0 is absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""


def test_a_stage_stands_alone(stage: str) -> None:
    """It imports no other stage, nothing of the companion or the tests, and its own modules relatively."""
    for path, tree in sources(stage):
        depth = len(path.relative_to(folder_of(stage)).parts)
        for level, module in imported(tree):
            if level == 0:
                assert module.partition(".")[0] not in {"stages", "strata", "tests"}, f"{path}: {module}"
            assert level <= depth, f"{path}: an import climbs out of the stage"


def test_nothing_unsafe_is_imported_or_called(stage: str) -> None:
    """No pickle on any socket or disk, no eval; transformers serves nobody."""
    for path, tree in sources(stage):
        for level, module in imported(tree):
            assert level or module.partition(".")[0] not in FORBIDDEN_MODULES, f"{path}: {module}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                assert node.attr not in FORBIDDEN_NAMES - {"eval"}, f"{path}:{node.lineno}: {node.attr}"
                is_torch_load = node.attr == "load" and getattr(node.value, "id", "") == "torch"
                assert not is_torch_load, f"{path}:{node.lineno}: torch.load"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                allowed = {"exec"} if COMPILES in path.as_posix() else set()
                assert node.func.id not in FORBIDDEN_NAMES - allowed, f"{path}:{node.lineno}: {node.func.id}"


def test_every_module_says_what_it_is(stage: str) -> None:
    for path, tree in sources(stage):
        if path.read_text().strip():
            assert ast.get_docstring(tree), f"{path} has no docstring"


def test_files_stay_small(stage: str) -> None:
    for path, _ in sources(stage):
        lines = len(path.read_text().splitlines())
        assert lines <= MAX_LINES, f"{path} has {lines} lines"


@pytest.mark.parametrize("role", ["main", "detokenizer"])
def test_the_light_processes_import_no_torch(stage: str, role: str) -> None:
    """DESIGN §8, from the source: what these modules import at the top, followed through the stage."""
    starts = {"main": "server.py", "detokenizer": "managers/detokenizer_manager.py"}
    todo, seen = [folder_of(stage) / starts[role]], set[Path]()
    while todo:
        path = todo.pop()
        if path in seen or not path.exists():
            continue
        seen.add(path)
        for node in _top_level(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                heavy = {alias.name.partition(".")[0] for alias in node.names} & {"torch", "transformers"}
                assert not heavy, f"{path}: {heavy}"
            elif node.level == 0:
                assert (node.module or "").partition(".")[0] not in {"torch", "transformers"}, path
            else:
                base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                todo += [base.with_suffix(".py"), base / "__init__.py"]
                todo += [base / f"{alias.name}.py" for alias in node.names]
    assert len(seen) > 3


def _top_level(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run when the module is imported: not those of functions or of type checking."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
