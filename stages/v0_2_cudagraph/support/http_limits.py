"""Bounds on what a client may send, and the key check; main's outermost HTTP layer.

Nothing here knows a route: one uvicorn protocol bounds the raw bytes of a request, one ASGI middleware checks
the key, one function reads a body.
"""

from __future__ import annotations

import hmac

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .http_errors import ApiError, bad_request

MAX_BODY_BYTES = 16 << 20
MAX_HEAD_BYTES = 64 << 10
MAX_DISCARDED_BYTES = 4 * MAX_BODY_BYTES
"""A refused body is read on and thrown away, so that the client can read the refusal; up to here."""

OPEN_PATHS = frozenset({"/health"})
"""Paths that need no key, for load balancers."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's fast protocol with a bound on request heads and on endless bodies, which it lacks."""

    _in_head = True
    _message_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._message_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head and self._message_bytes > MAX_HEAD_BYTES:
            self._refuse(
                "431 Request Header Fields Too Large", f"The request head is over {MAX_HEAD_BYTES} bytes."
            )
        elif self._message_bytes > MAX_DISCARDED_BYTES:
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._message_bytes = True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse("400 Bad Request", msg)

    def _refuse(self, status: str, message: str) -> None:
        body = bad_request(message).to_json()
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


class ApiKeyMiddleware:
    """Lets a request through only if it carries ``Authorization: Bearer KEY``."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401, "This server wants 'Authorization: Bearer KEY' with its API key.", None, "invalid_api_key"
        )
        await error.to_response()(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        # The comparison takes as long for a nearly right key as for a wrong one.
        return hmac.compare_digest(key.strip(), self._expected) and scheme.lower() == b"bearer"


JSON_TYPES = ("", "application/json", "application/x-www-form-urlencoded")
"""Content types read as JSON: none, the right one, and what ``curl -d`` sends unless told otherwise."""


async def read_body(request: Request) -> bytes:
    """The request's body; raises `ApiError` 413 as soon as it is known to be over the limit."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in JSON_TYPES and not content_type.endswith("+json"):
        raise bad_request(
            f"The body must be JSON (content-type: application/json), not {content_type[:100]}."
        )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    pieces, size = [], 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > MAX_BODY_BYTES:
                raise _too_large()
            pieces.append(piece)
    except ClientDisconnect as gone:
        raise bad_request("The client went away before the end of its body.") from gone
    return b"".join(pieces)


def _too_large() -> ApiError:
    return ApiError(413, f"The body is over the limit of {MAX_BODY_BYTES} bytes.", None, "request_too_large")
