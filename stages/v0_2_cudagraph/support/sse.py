"""Answers that end early when their client goes away, as plain objects and as server-sent events. Main only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .http_errors import ApiError

ResultT = TypeVar("ResultT")


class ClientGone(Exception):
    """The client closed its connection before its answer was ready."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Result of ``work``; if the client goes first, ``work`` is cancelled and `ClientGone` raised.

    The request's body must have been read: what is left to receive then is the disconnect alone.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            # Its cleanup (aborting requests) is done before the caller goes on.
            await asyncio.gather(task, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer_while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response made by ``work``, or an empty one that nobody will read."""
    try:
        return await unless_disconnected(request.receive, work)
    except ClientGone:
        return Response(status_code=499)


class EventStream(Response):
    """Sends each item of ``events`` (JSON) as one server-sent event, then ``[DONE]``.

    The head goes out with the first event: a request that fails before it still gets a proper status. A later
    failure is an event of its own.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._pump(send))
        except ClientGone:
            return

    async def _pump(self, send: Send) -> None:
        started = False
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    if not started:
                        started = True
                        await send(
                            {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                        )
                    await send(_body(event))
            except ApiError as error:
                if not started:
                    raise
                await send(_body(error.to_json()))
        await send(_body(b"[DONE]", more=False))


def _body(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": more}
