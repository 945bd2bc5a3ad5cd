"""`strata bench`: checks what was asked, runs the workloads one after the other, prints and writes the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ..adapters import DIALECTS
from ..errors import UserError
from ..stages import existing_stages, find_stage
from .setup import BenchSetup
from .shapes import SHAPES

ALL = ("steady", "static", "shared-prefix")
ALL_OF_A_SHAPE = ("stream", "steady", "prefill", "mix")
DEFAULT_PATHS = {"cpu": ["torch"], "cuda": ["triton", "flashinfer"]}
CUDA_POOL = ("max_total_tokens", 300_000)
"""The pool of a shape on a GPU: mix fits at its fullest (276,793 tokens), so nothing is ever retracted."""


def run_bench(
    names: Sequence[str],
    stages: str | None,
    model_path: Path | None,
    json_path: Path | None,
    setup: BenchSetup,
) -> None:
    """Run the workloads ``names`` (all by default) on ``stages`` (a comma-separated list; all by default)."""
    _check_names(names, ALL)
    setup = dataclasses.replace(setup, stages=_stage_keys(stages), model_path=model_path or _embedded())
    if not (setup.model_path / "config.json").is_file():
        raise UserError(f"--model-path {setup.model_path} has no config.json", "Name a Hugging Face folder")
    if setup.device == "cuda":
        _check_cuda()
    _run(list(names) or list(ALL), setup, json_path)


def run_shape_bench(
    names: Sequence[str],
    stages: str | None,
    shape: str,
    attention: str | None,
    json_path: Path | None,
    setup: BenchSetup,
) -> bool:
    """The same on dummy weights of ``shape``, for each path in ``attention``; True if nothing failed."""
    _check_names(names, ALL_OF_A_SHAPE)
    if shape not in SHAPES:
        raise UserError(f"there is no shape {shape!r}", f"Choose from: {', '.join(SHAPES)}")
    setup = dataclasses.replace(setup, stages=_stage_keys(stages), load_format="dummy")
    if setup.device == "cuda":
        _check_cuda()
        setup = dataclasses.replace(setup, server_args=(CUDA_POOL,))
    paths = attention.split(",") if attention else DEFAULT_PATHS[setup.device]
    _check_paths(setup, paths)
    from .path_command import run_path_bench

    return run_path_bench(list(names) or ALL_OF_A_SHAPE, paths, shape, setup, json_path)


def _check_names(names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"there is no workload {name!r} here", f"Choose from: {', '.join(known)}")


def _check_paths(setup: BenchSetup, paths: Sequence[str]) -> None:
    """Raise a ``UserError`` for a path that no stage has on this device."""
    for path in paths:
        if not any(has_path(stage, path, setup.device) for stage in setup.stages):
            attentions = (
                ["torch"] if setup.device == "cpu" else list(DIALECTS[setup.stages[0]].attention_args)
            )
            raise UserError(
                f"there is no attention path {path!r} for {', '.join(setup.stages)} on {setup.device}",
                f"Choose from: {', '.join(attentions)}; then may follow +no-cache, and from v0.2 on "
                f"{'+graphs' if setup.device == 'cpu' else '+no-graphs'}",
            )


def has_path(stage: str, path: str, device: str) -> bool:
    try:
        DIALECTS[stage].path_args(path, device)
    except KeyError:
        return False
    return True


def _stage_keys(stages: str | None) -> tuple[str, ...]:
    chosen = [find_stage(key) for key in stages.split(",")] if stages else existing_stages()
    return tuple(stage.key for stage in chosen)


def _run(names: Sequence[str], setup: BenchSetup, json_path: Path | None) -> None:
    from ..console import make_console
    from .contenders import make_contenders
    from .limits import measure_limits
    from .report import describe, table, write_json
    from .workloads import WORKLOADS

    console = make_console()
    limits = measure_limits(setup)
    contenders = make_contenders(setup)
    rows = []
    for name in names:
        console.print(f"Running {name} …")
        rows += list(WORKLOADS[name](setup, contenders, limits))
    console.print(table(rows))
    if limits:
        console.print(
            f"Limit: {limits.weight_gb:.2f} GB of weights at {limits.copy_gb_s:.1f} GB/s (measured copy) "
            f"allow {limits.steps_per_s:.1f} steps/s."
        )
    if json_path is not None:
        write_json(json_path, describe(setup, rows, limits))


def _embedded() -> Path:
    from ..model_zoo import fetch

    return fetch()


def _check_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            "--device cuda, but torch sees no CUDA device", "`strata doctor` says what is missing"
        )
