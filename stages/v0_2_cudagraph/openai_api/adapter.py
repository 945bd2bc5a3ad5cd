"""The OpenAI-compatible routes: each turns its request into items, and their outputs into OpenAI's objects."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..managers.io_struct import TokenizedGenerateReqInput
from ..managers.tokenizer_manager import TokenizerManager
from ..support.http_errors import bad_request
from ..support.http_limits import read_body
from ..support.sse import EventStream, answer_while_connected
from .completion_writer import completion_writers
from .protocol import (
    AnswerHead,
    CompletionRequest,
    chat_choice,
    chat_delta,
    parse_chat,
    parse_completion,
    usage,
)

JSON = "application/json"


class OpenAIRoutes:
    """Handlers over one TokenizerManager; ``model_name`` is what an answer calls the model by default."""

    def __init__(self, manager: TokenizerManager, model_name: str, started_at: int) -> None:
        self._manager = manager
        self._model_name = model_name
        self._started_at = started_at

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1")
        router.add_api_route("/models", self.models, methods=["GET"], response_model=None)
        router.add_api_route("/completions", self.completions, methods=["POST"], response_model=None)
        router.add_api_route(
            "/chat/completions", self.chat_completions, methods=["POST"], response_model=None
        )
        return router

    async def models(self) -> Response:
        model = {
            "id": self._model_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "strata",
            "max_model_len": self._manager.engine.context_len,
        }
        return Response(msgspec.json.encode({"object": "list", "data": [model]}), media_type=JSON)

    async def completions(self, request: Request) -> Response:
        body = parse_completion(await read_body(request))
        stream = bool(body.stream)
        requests = await self._manager.tokenize(body.to_items(), stream)
        head = AnswerHead("cmpl", "text_completion", body.model or self._model_name)
        if stream:
            return EventStream(self._completion_events(requests, head, body))
        return await answer_while_connected(request, self._completion(requests, head, body))

    async def _completion(
        self, requests: list[TokenizedGenerateReqInput], head: AnswerHead, body: CompletionRequest
    ) -> Response:
        async with self._manager.open_call(requests) as call:
            states = await call.results()
        writers = completion_writers(body, call, self._manager.tokenizer)
        choices = [writer.write(state) for writer, state in zip(writers, states, strict=True)]
        answer = head.with_choices(choices, usage=usage(call))
        return Response(msgspec.json.encode(answer), media_type=JSON)

    async def _completion_events(
        self, requests: list[TokenizedGenerateReqInput], head: AnswerHead, body: CompletionRequest
    ) -> AsyncGenerator[bytes, None]:
        async with self._manager.open_call(requests) as call:
            writers = completion_writers(body, call, self._manager.tokenizer)
            async for changed in call.updates():
                for state in changed:
                    choice = writers[state.index].write(state)
                    yield msgspec.json.encode(head.with_choices([choice], usage=usage(call)))

    async def chat_completions(self, request: Request) -> Response:
        body = parse_chat(await read_body(request))
        stream = bool(body.stream)
        try:
            prompt = self._manager.tokenizer.render_chat(body.to_messages())
        except ValueError as error:
            raise bad_request(str(error), "messages") from None
        requests = await self._manager.tokenize([body.to_item(prompt)], stream)
        model = body.model or self._model_name
        if stream:
            return EventStream(
                self._chat_events(requests, AnswerHead("chatcmpl", "chat.completion.chunk", model))
            )
        return await answer_while_connected(
            request, self._chat_completion(requests, AnswerHead("chatcmpl", "chat.completion", model))
        )

    async def _chat_completion(self, requests: list[TokenizedGenerateReqInput], head: AnswerHead) -> Response:
        async with self._manager.open_call(requests) as call:
            states = await call.results()
        answer = head.with_choices([chat_choice(state) for state in states], usage=usage(call))
        return Response(msgspec.json.encode(answer), media_type=JSON)

    async def _chat_events(
        self, requests: list[TokenizedGenerateReqInput], head: AnswerHead
    ) -> AsyncGenerator[bytes, None]:
        """Of each answer the role in its first chunk, then text, then an empty delta with the finish reason."""
        async with self._manager.open_call(requests) as call:
            sent = [0] * len(call.states)
            greeted: set[int] = set()
            async for changed in call.updates():
                for state in changed:
                    choices = []
                    if state.index not in greeted:
                        greeted.add(state.index)
                        choices.append(chat_delta(state, {"role": "assistant", "content": ""}))
                    if piece := state.text[sent[state.index] :]:
                        sent[state.index] = len(state.text)
                        choices.append(chat_delta(state, {"content": piece}))
                    if state.finish_reason is not None:
                        choices.append(chat_delta(state, {}, is_last=True))
                    for choice in choices:
                        yield msgspec.json.encode(head.with_choices([choice], usage=usage(call)))
