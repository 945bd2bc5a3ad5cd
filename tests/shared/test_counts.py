"""How many shared tests each stage has, pinned, so that a stage or a file can't drop out in silence.

After adding tests, ``STRATA_PIN=1 pytest tests/shared/test_counts.py tests/shared`` writes the new counts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from strata.adapters import existing_stages

PINNED = Path(__file__).parent / "counts.json"


def test_counts(request: pytest.FixtureRequest) -> None:
    """Counts of the files collected in this run (before -m and -k) equal the pinned ones."""
    from tests.conftest import collected

    counts = {file: dict(sorted(per_stage.items())) for file, per_stage in sorted(collected.items())}
    if os.environ.get("STRATA_PIN"):
        PINNED.write_text(json.dumps(counts, indent=2) + "\n")
    pinned = json.loads(PINNED.read_text())
    files = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    assert set(pinned) == files - {Path(__file__).name}, "a test file is not pinned, or gone"
    assert {file: pinned[file] for file in counts} == counts
    assert all(set(pinned[file]) == set(existing_stages()) for file in pinned), "a stage dropped out"
