"""What a bench run is asked to measure; one value, made from the command line, that everything else reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BenchSetup:
    """``load_format`` is the stages' flag: with ``dummy`` the model folder needs a config alone, and no peers run.

    ``server_args`` are further fields of the stages' ServerArgs, the same for each stage.
    """

    model_path: Path
    stages: tuple[str, ...]
    device: str = "cpu"
    dtype: str = "float32"
    load_format: str = "auto"
    seed: int = 0
    quick: bool = False
    max_running_requests: int | None = None
    server_args: tuple[tuple[str, object], ...] = ()

    @property
    def rounds(self) -> int:
        """Interleaved rounds per number: an odd count, so that the median was measured."""
        return 1 if self.quick else 5

    @property
    def slow_rounds(self) -> int:
        """The same for workloads whose one round takes minutes."""
        return 1 if self.quick else 3
