"""CAPABILITIES of every stage against `book/data/capabilities.toml`, DESIGN §3's table."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from strata.adapters import DIALECTS

TABLE = Path(__file__).parents[2] / "book" / "data" / "capabilities.toml"
ALL_STAGES = ["v0.1", "v0.2", "v0.3"]


def table() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(TABLE.read_text())


def test_a_stage_can_do_what_the_table_says(stage: str) -> None:
    wanted = {
        capability["id"]
        for capability in table()["capability"]
        if stage in capability["stages"] and stage not in capability.get("missing", [])
    }
    assert set(DIALECTS[stage].capabilities) == wanted


def test_the_table_is_whole() -> None:
    rows, capabilities = table()["row"], table()["capability"]
    titles = [row["title"] for row in rows]
    assert len(titles) == len(set(titles)) == 17, "DESIGN §3 has 17 rows"
    assert all(row[stage] for row in rows for stage in ALL_STAGES)
    ids = [capability["id"] for capability in capabilities]
    assert len(ids) == len(set(ids))
    for capability in capabilities:
        assert capability["row"] in titles and capability["what"]
        assert set(capability.get("missing", [])) <= set(capability["stages"]) <= set(ALL_STAGES)


def test_every_stage_folder_has_a_dialect() -> None:
    """A stage that exists can't be left out of the suite."""
    folders = {path.parent.name for path in (Path(__file__).parents[2] / "stages").glob("*/__init__.py")}
    known = {dialect.package.removeprefix("stages.") for dialect in DIALECTS.values() if dialect.exists}
    assert folders == known
