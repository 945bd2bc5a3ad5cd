"""Errors that a client sees: always the OpenAI error object, whatever went wrong. Used by main only."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 500: "server_error", 503: "server_error"}


class ApiError(Exception):
    """An answer other than success: HTTP status, a message for people, and the request's field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def to_dict(self) -> dict[str, Any]:
        """The error object as OpenAI's clients expect it."""
        return {
            "error": {
                "message": self.message,
                "type": ERROR_TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def to_json(self) -> bytes:
        return msgspec.json.encode(self.to_dict())

    def to_response(self) -> Response:
        headers = {"www-authenticate": "Bearer"} if self.status == 401 else None
        return Response(self.to_json(), self.status, headers, media_type="application/json")


def bad_request(message: str, param: str | None = None) -> ApiError:
    """Status 400: the request asks for something that is not possible."""
    return ApiError(400, message, param)
