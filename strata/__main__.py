"""``python -m strata``: the same as the ``strata`` command."""

from __future__ import annotations

from .cli import main

main()
