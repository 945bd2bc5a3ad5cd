"""One log format for all processes of a server: `[time] process: text`, on standard error."""

from __future__ import annotations

import logging


def configure_logging(process_name: str, level: str) -> None:
    """Send this process' log lines to standard error, marked with its name; libraries only from warnings on."""
    logging.basicConfig(
        format=f"[%(asctime)s] {process_name}: %(message)s",
        datefmt="%H:%M:%S",
        level=level.upper(),
        force=True,
    )
    for library in ("uvicorn", "uvicorn.error", "asyncio", "httpx"):
        logging.getLogger(library).setLevel(max(logging.WARNING, logging.getLogger().level))
