"""The architectures this stage can serve: a module of this package that sets ``EntryClass`` adds one.

Main reads the names before anything starts, and so from the modules' text: importing them would bring in torch.
Fixed once imported.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, Final

_ENTRY_CLASS = re.compile(r"^EntryClass = (\w+)$", re.MULTILINE)


def _read_entry_classes() -> dict[str, str]:
    modules = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        if (entry := _ENTRY_CLASS.search(file.read_text(encoding="utf-8"))) is not None:
            modules[entry[1]] = file.stem
    return modules


SUPPORTED_ARCHITECTURES: Final = _read_entry_classes()
"""``architectures`` of a config.json, which are names of classes -> module in this package."""


def load_model_class(architecture: str) -> type[Any]:
    """The class that serves a supported architecture."""
    return importlib.import_module(f".{SUPPORTED_ARCHITECTURES[architecture]}", __name__).EntryClass
