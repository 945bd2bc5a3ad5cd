"""uvicorn as main uses it: on a socket taken early, with limits, and without signal handling of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from .http_limits import LimitedHttpProtocol

GRACEFUL_SHUTDOWN_S = 1


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed, else (None) asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class HttpServer(uvicorn.Server):
    """Serves ``app`` until `end`; main handles signals, ends its children and picks its exit code itself."""

    def __init__(self, app: ASGIApp) -> None:
        config = uvicorn.Config(
            app,
            http=LimitedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
        )
        super().__init__(config)

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()

    def end(self) -> None:
        """Stop listening and return from `serve` once the requests under way have been answered."""
        self.should_exit = True
