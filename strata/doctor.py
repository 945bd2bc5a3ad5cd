"""What this machine can run: packages, devices, attention paths, compilers, the model, and how to add the rest.

Looks, never changes anything. Nothing here raises for what it finds: a broken package is a finding too.
"""

from __future__ import annotations

import importlib
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

from .cache import cache_folder
from .stages import ROOT, existing_stages

SETUP = "make setup"
State = Literal["ok", "off", "missing"]
"""``off`` cannot be used here but is not needed; ``missing`` makes something fail."""


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``mend`` is a command, or what else helps."""

    topic: str
    state: State
    text: str
    mend: str = ""


def run_doctor() -> bool:
    """Print every finding; True if nothing that a CPU server needs is missing."""
    whole = True
    for examine in (_python, _packages, _torch, _packed_linears, _attention, _compilers, _model, _stages):
        for finding in _guarded(examine):
            whole = whole and finding.state != "missing"
            mend = f"  ->  {finding.mend}" if finding.mend else ""
            print(f"{finding.state:9}{finding.topic:16}{finding.text}{mend}")
    return whole


def _guarded(examine: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from examine()
    except Exception as error:
        topic = examine.__name__.strip("_").replace("_", " ")
        yield Finding(topic, "missing", f"{type(error).__name__}: {error}".splitlines()[0], SETUP)


def _python() -> Iterator[Finding]:
    text = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    state: State = "ok" if sys.version_info >= (3, 11) else "missing"
    yield Finding(
        "python", state, text, "" if state == "ok" else "install Python 3.11 or newer, then make setup"
    )


def _packages() -> Iterator[Finding]:
    """Each package that pyproject.toml asks for, against the version in constraints.txt."""
    pins, direct = _pins(), _direct_requirements()
    absent = [name for name in direct if _version(name) is None]
    others = [
        f"{name} {_version(name)} (pinned {pins[name]})"
        for name in direct
        if name in pins and _version(name) not in (None, pins[name])
    ]
    if absent:
        yield Finding("packages", "missing", f"not installed: {', '.join(absent)}", SETUP)
    if others:
        yield Finding("packages", "off", f"not as tested: {', '.join(others)}", SETUP)
    if not absent and not others:
        yield Finding("packages", "ok", f"all {len(direct)} that are asked for, as constraints.txt pins them")


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def _direct_requirements() -> list[str]:
    from packaging.requirements import Requirement

    parsed = [Requirement(text) for text in metadata.requires("strata") or []]
    return [
        requirement.name
        for requirement in parsed
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]


def _version(name: str) -> str | None:
    """The installed version without its local part: a CPU build (2.13.0+cpu) is that release."""
    try:
        return metadata.version(name).split("+")[0]
    except metadata.PackageNotFoundError:
        return None


def _torch() -> Iterator[Finding]:
    import torch

    cpu = torch.backends.cpu.get_cpu_capability()
    yield Finding("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads, {cpu}")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Finding(f"cuda:{index}", "ok", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    if not torch.cuda.is_available():
        yield Finding("cuda", "off", "no CUDA device that this torch can use; the CPU serves")


def _packed_linears() -> Iterator[Finding]:
    import torch

    for stage in existing_stages():
        packing: Any = importlib.import_module(f"{stage.module}.support.packed_linear")
        if packing.can_pack(torch.float32):
            yield Finding("packed linears", "ok", f"{stage.key} packs its float32 weights for oneDNN")
        else:
            yield Finding(
                "packed linears", "off", f"{stage.key} falls back to F.linear, slower on the CPU", SETUP
            )


def _attention() -> Iterator[Finding]:
    import torch

    has_cuda = torch.cuda.is_available()
    yield Finding("attention", "ok", "torch: on every device")
    for name, package, extra in (("Triton", "triton", ""), ("FlashInfer", "flashinfer-python", "cuda")):
        version = _version(package)
        install = f"{sys.executable} -m pip install -c constraints.txt -e '.[{extra}]'" if extra else SETUP
        if version is None:
            yield Finding("attention", "off", f"{name}: not installed", install if has_cuda else "")
        elif not has_cuda:
            yield Finding("attention", "off", f"{name} {version}: needs a CUDA device")
        else:
            importlib.import_module(package.removesuffix("-python"))
            yield Finding("attention", "ok", f"{name} {version}: usable")


def _compilers() -> Iterator[Finding]:
    """Only GPU kernels are compiled here: Triton's launcher with cc, FlashInfer with nvcc and ninja."""
    import torch

    needed = torch.cuda.is_available()
    for command, purpose, mend in (
        ("cc", "Triton and FlashInfer", "apt-get install gcc"),
        ("nvcc", "FlashInfer", "install the CUDA toolkit that matches torch"),
        ("ninja", "FlashInfer", f"{sys.executable} -m pip install ninja"),
    ):
        if path := shutil.which(command):
            yield Finding("compilers", "ok", f"{command} at {path}")
        else:
            yield Finding("compilers", "off", f"no {command} ({purpose} on a GPU)", mend if needed else "")


def _model() -> Iterator[Finding]:
    from .model_zoo import EMBEDDED, find

    if folder := find():
        yield Finding("model", "ok", f"{EMBEDDED.name} in {folder}")
    else:
        text = f"{EMBEDDED.name} is not in {cache_folder()}"
        yield Finding("model", "missing", text, "strata model fetch")


def _stages() -> Iterator[Finding]:
    keys = ", ".join(stage.key for stage in existing_stages())
    yield Finding("stages", "ok" if keys else "missing", keys or f"none under {ROOT / 'stages'}")
