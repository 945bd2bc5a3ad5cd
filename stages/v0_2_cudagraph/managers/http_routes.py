"""The native routes: `/generate`, and what tells of the server. Main only; objects live as long as it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from .. import STAGE
from ..sampling_params import SamplingParams
from ..server_args import ServerArgs
from ..support.http_errors import ApiError
from ..support.http_limits import read_body
from ..support.sse import EventStream, answer_while_connected
from .generate_protocol import generate_output, parse_generate
from .io_struct import TokenizedGenerateReqInput
from .logprob_lists import TextOf
from .request_tokenizer import GenerateItem
from .tokenizer_manager import TokenizerManager

HEALTH_TIMEOUT_S = 30.0
"""`/health_generate` waits so long for its one token."""


def json_response(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


class NativeRoutes:
    """Handlers over one TokenizerManager; ``is_alive`` says whether every process of the server lives."""

    def __init__(
        self, manager: TokenizerManager, server_args: ServerArgs, is_alive: Callable[[], bool]
    ) -> None:
        self._manager = manager
        self._server_args = server_args
        self._is_alive = is_alive

    def router(self) -> APIRouter:
        router = APIRouter()
        for path, handler, methods in (
            ("/health", self.health, ["GET"]),
            ("/health_generate", self.health_generate, ["GET"]),
            ("/get_model_info", self.get_model_info, ["GET"]),
            ("/get_server_args", self.get_server_args, ["GET"]),
            ("/get_internal_state", self.get_internal_state, ["GET"]),
            ("/flush_cache", self.flush_cache, ["GET", "POST"]),
            ("/generate", self.generate, ["POST", "PUT"]),
        ):
            router.add_api_route(path, handler, methods=methods, response_model=None)
        return router

    async def health(self) -> Response:
        """Whether every process lives; costs the engine nothing."""
        if not self._is_alive():
            raise ApiError(503, "A process of this server has died; the server is ending.")
        return json_response({"status": "ok"})

    async def health_generate(self, request: Request) -> Response:
        """Whether the whole ring works: one prompt of one token, one token out."""
        item = GenerateItem([0], SamplingParams(max_new_tokens=1, temperature=0.0), "input_ids")
        requests = await self._manager.tokenize([item], stream=False)
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await answer_while_connected(request, self._generate(requests, is_single=True))
        except TimeoutError:
            raise ApiError(503, f"No token within {HEALTH_TIMEOUT_S:.0f} s.") from None
        return json_response({"status": "ok"})

    async def get_model_info(self) -> Response:
        paths = {
            "model_path": self._server_args.model_path,
            "tokenizer_path": self._server_args.tokenizer_path,
        }
        return json_response(paths | msgspec.to_builtins(self._manager.engine))

    async def get_server_args(self) -> Response:
        """All arguments but the key."""
        return json_response(self._server_args.public_dict())

    async def get_internal_state(self) -> Response:
        return json_response({"stage": STAGE} | await self._manager.get_internal_state())

    async def flush_cache(self) -> Response:
        """Forget cached prefixes; 400 while requests are waiting or running."""
        answer = await self._manager.flush_cache()
        if not answer.get("success"):
            raise ApiError(400, "The cache can't be flushed while requests are waiting or running.")
        return json_response(answer)

    async def generate(self, request: Request) -> Response:
        """Continue one prompt, or a list of them at once, each ``n`` times."""
        body = parse_generate(await read_body(request))
        requests = await self._manager.tokenize(body.to_items(), body.stream)
        is_single = body.is_single and requests[0].sampling_params.n == 1
        text_of = self._manager.tokenizer.token_text if body.return_text_in_logprobs else None
        if body.stream:
            return EventStream(self._generate_events(requests, is_single, text_of))
        return await answer_while_connected(request, self._generate(requests, is_single, text_of))

    async def _generate(
        self, requests: list[TokenizedGenerateReqInput], is_single: bool, text_of: TextOf | None = None
    ) -> Response:
        async with self._manager.open_call(requests) as call:
            outputs = [generate_output(state, text_of) for state in await call.results()]
        return json_response(outputs[0] if is_single else outputs)

    async def _generate_events(
        self, requests: list[TokenizedGenerateReqInput], is_single: bool, text_of: TextOf | None
    ) -> AsyncGenerator[bytes, None]:
        """One event per answer that has grown; with several answers ``index`` tells which it is."""
        async with self._manager.open_call(requests) as call:
            async for changed in call.updates():
                for state in changed:
                    output = generate_output(state, text_of)
                    yield msgspec.json.encode(output if is_single else {"index": state.index} | output)
