"""One face over the engines and servers of all stages, for tests, chat, tour, benches and traces."""

from __future__ import annotations

from .dialects import DIALECTS, Dialect, existing_stages
from .engine import Engine, Event, NodeView, RequestView, Snapshot, drain, outputs
from .server_driver import ServerDriver, ServerError, free_port

__all__ = [
    "DIALECTS",
    "Dialect",
    "Engine",
    "Event",
    "NodeView",
    "RequestView",
    "ServerDriver",
    "ServerError",
    "Snapshot",
    "drain",
    "existing_stages",
    "free_port",
    "outputs",
]
