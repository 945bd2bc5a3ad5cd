"""The FastAPI application of the main process: routes, the key check, and errors in one form."""

from __future__ import annotations

import http
import logging
import time
from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from .managers.http_routes import NativeRoutes
from .managers.tokenizer_manager import TokenizerManager
from .openai_api.adapter import OpenAIRoutes
from .server_args import ServerArgs
from .support.http_errors import ApiError
from .support.http_limits import ApiKeyMiddleware

logger = logging.getLogger(__name__)


def create_app(manager: TokenizerManager, server_args: ServerArgs, is_alive: Callable[[], bool]) -> FastAPI:
    """All routes over one TokenizerManager. ``is_alive`` is asked by `/health`."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.include_router(NativeRoutes(manager, server_args, is_alive).router())
    model_name = Path(server_args.model_path).resolve().name
    app.include_router(OpenAIRoutes(manager, model_name, int(time.time())).router())
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    if server_args.api_key:
        app.add_middleware(ApiKeyMiddleware, api_key=server_args.api_key)
    return app


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.to_response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405, in the common form."""
    assert isinstance(error, HTTPException)
    phrase = http.HTTPStatus(error.status_code).phrase
    response = ApiError(error.status_code, f"{phrase}: {request.method} {request.url.path}").to_response()
    response.headers.update(error.headers or {})
    return response


async def _on_bug(request: Request, error: Exception) -> Response:
    logger.error("a bug in %s %r", request.method, request.url.path, exc_info=error)
    return ApiError(500, "Internal server error; the server's log has the details.").to_response()
