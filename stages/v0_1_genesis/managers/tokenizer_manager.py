"""The main process' end of the ring: prompts become requests, and texts find their way back to who waits.

One TokenizerManager lives as long as the server, on one event loop. A `Call` lives as long as one HTTP request,
which may hold many prompts; a `ReqState` as long as one prompt of it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from ..constrained.compiler import CompilerBusyError, RegexCompiler
from ..constrained.regex_index import RegexIndex
from ..hf_transformers_utils import Tokenizer
from ..sampling_params import SamplingParams
from ..support.http_errors import ApiError, bad_request
from ..support.transport import Receiver, Sender
from .io_struct import (
    AbortReq,
    BatchStrOut,
    ControlOut,
    FlushCacheReq,
    GetInternalStateReq,
    TokenizedGenerateReqInput,
    TokenizerManagerInput,
)

logger = logging.getLogger(__name__)

INLINE_CHARACTERS = 4096
"""Texts up to this length are tokenized on the event loop; longer ones in a thread, so that others go on."""

CONTROL_TIMEOUT_S = 60.0


class EngineInfo(msgspec.Struct):
    """What the router says of its engine when it is ready."""

    max_total_num_token: int
    max_req_input_len: int
    context_len: int
    vocab_size: int
    device: str = ""
    dtype: str = ""
    attention: str = ""


@dataclass(slots=True)
class GenerateItem:
    """One prompt as a client gave it: text or token ids, and how to go on from there.

    ``param`` names the prompt's field in errors; ``unlimited`` means as many new tokens as the limits allow.
    """

    prompt: str | list[int]
    sampling_params: SamplingParams
    param: str
    rid: str | None = None
    unlimited: bool = False
    add_special_tokens: bool = True
    return_normalized_logprob: bool = False
    normalized_logprob_start_len: int = 0


@dataclass(slots=True, eq=False)
class ReqState:
    """The output of one prompt so far; ``index`` is its place in its call."""

    index: int
    rid: str
    call: Call
    text: str = ""
    meta_info: dict[str, Any] | None = None
    finish_reason: dict[str, Any] | None = None
    is_changed: bool = False


class Call:
    """One HTTP request's prompts in flight, and what wakes the coroutine that waits for them."""

    def __init__(self, rids: Sequence[str], stream: bool) -> None:
        self.stream = stream
        self.states = [ReqState(index, rid, self) for index, rid in enumerate(rids)]
        self._num_unfinished = len(self.states)
        self._changed: list[ReqState] = []
        self._event = asyncio.Event()
        self._error: ApiError | None = None

    def receive(
        self, state: ReqState, text: str, meta_info: dict[str, Any], reason: dict[str, Any] | None
    ) -> None:
        """Take in one more piece of a prompt's output."""
        state.text += text
        state.meta_info = meta_info
        state.finish_reason = reason
        if not state.is_changed:
            state.is_changed = True
            self._changed.append(state)
        if reason is not None:
            self._num_unfinished -= 1
            if "status_code" in reason:  # the engine found that the request can't be served
                self.fail(ApiError(reason["status_code"], reason["message"]))
        if self.stream or not self._num_unfinished:
            self._event.set()

    def fail(self, error: ApiError) -> None:
        """Wake who waits with an error instead of an output."""
        self._error = error
        self._event.set()

    async def updates(self) -> AsyncIterator[list[ReqState]]:
        """Prompts whose output has grown, until all have ended; without ``stream`` once, at the end."""
        while True:
            await self._event.wait()
            self._event.clear()
            if self._error is not None:
                raise self._error
            changed, self._changed = self._changed, []
            for state in changed:
                state.is_changed = False
            yield changed
            if not self._num_unfinished:
                return

    async def results(self) -> list[ReqState]:
        """Wait until every prompt has ended; the states in the order of the prompts."""
        async for _ in self.updates():
            pass
        return self.states


class TokenizerManager:
    """Validates and tokenizes prompts, sends them to the router, and hands outputs to the calls that wait.

    A request has two names: the client's ``rid``, unique among those in flight, and a fresh one inside the
    ring, so that a late output of an aborted request can never reach a newer one of the same name.
    """

    def __init__(self, tokenizer: Tokenizer, engine: EngineInfo, sender: Sender) -> None:
        self.tokenizer = tokenizer
        self.engine = engine
        self._sender = sender
        self._regex_compiler = RegexCompiler(tokenizer, engine.vocab_size)
        self.rid_to_state: dict[str, ReqState] = {}
        self._client_rids: set[str] = set()
        self._control: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._failure: ApiError | None = None

    # -- requests ----------------------------------------------------------------------------------------

    async def tokenize(self, items: Sequence[GenerateItem], stream: bool) -> list[TokenizedGenerateReqInput]:
        """Check every item and give it its token ids; raises `ApiError` 400 naming the first field at fault."""
        texts = [item.prompt for item in items if isinstance(item.prompt, str)]
        for item in items:
            self._check_before_tokenizing(item)
        if sum(map(len, texts)) > INLINE_CHARACTERS:
            requests = await asyncio.to_thread(self._tokenize_all, items, stream)
        else:
            requests = self._tokenize_all(items, stream)
        for request in requests:
            if (regex := request.sampling_params.regex) is not None:
                request.regex_index = await self._compile_regex(regex)
        return requests

    @contextmanager
    def open_call(self, requests: Sequence[TokenizedGenerateReqInput]) -> Iterator[Call]:
        """Send ``requests``, whose rids are the client's; on leaving, whatever still runs is aborted (INV-FREE)."""
        if self._failure is not None:
            raise self._failure
        rids = [request.rid for request in requests]
        if len(set(rids)) < len(rids) or not self._client_rids.isdisjoint(rids):
            raise bad_request("rid must be unique among the requests in flight.", "rid")
        call = Call(rids, stream=any(request.stream for request in requests))
        self._client_rids.update(rids)
        inner_rids = [uuid.uuid4().hex for _ in rids]
        try:
            for inner_rid, request, state in zip(inner_rids, requests, call.states, strict=True):
                self.rid_to_state[inner_rid] = state
                request.rid = inner_rid
                self._sender.send(request)
            yield call
        finally:
            self._client_rids.difference_update(rids)
            for inner_rid in inner_rids:
                left = self.rid_to_state.pop(inner_rid, None)
                if left is not None and left.finish_reason is None:
                    self._sender.send(AbortReq(inner_rid))

    def _check_before_tokenizing(self, item: GenerateItem) -> None:
        try:
            item.sampling_params.verify(self.engine.vocab_size)
        except ValueError as error:
            raise bad_request(str(error), str(error).partition(" ")[0]) from None
        if not item.prompt:
            raise bad_request(f"{item.param} must not be empty.", item.param)
        if isinstance(item.prompt, str):
            limit = self._max_prompt_tokens * self.tokenizer.longest_token
            if len(item.prompt) > limit:
                raise bad_request(
                    f"{item.param} has {len(item.prompt)} characters; this server takes at most {limit}, and "
                    f"{self._limits}.",
                    item.param,
                )
        else:
            self._check_length(item, len(item.prompt))
            for token_id in item.prompt:
                if not 0 <= token_id < self.engine.vocab_size:
                    raise bad_request(
                        f"{item.param} holds the token id {token_id}; ids go from 0 to "
                        f"{self.engine.vocab_size - 1}.",
                        item.param,
                    )

    async def _compile_regex(self, regex: str) -> RegexIndex:
        try:
            return await self._regex_compiler.compile(regex)
        except ValueError as error:
            raise bad_request(str(error), "regex") from None
        except CompilerBusyError as error:
            raise ApiError(503, f"regex: {error}", "regex") from None

    def _tokenize_all(self, items: Sequence[GenerateItem], stream: bool) -> list[TokenizedGenerateReqInput]:
        return [self._tokenize_one(item, stream) for item in items]

    def _tokenize_one(self, item: GenerateItem, stream: bool) -> TokenizedGenerateReqInput:
        if isinstance(item.prompt, str):
            input_ids = self.tokenizer.encode(item.prompt, item.add_special_tokens)
            self._check_length(item, len(input_ids))
        else:
            input_ids = item.prompt
        if not 0 <= item.normalized_logprob_start_len < len(input_ids):
            raise bad_request(
                f"normalized_logprob_start_len must be in [0, {len(input_ids) - 1}], the prompt's last position; "
                f"got {item.normalized_logprob_start_len}.",
                "normalized_logprob_start_len",
            )
        return TokenizedGenerateReqInput(
            rid=item.rid or uuid.uuid4().hex,
            input_ids=input_ids,
            sampling_params=self._clamp(item, len(input_ids)),
            stream=stream,
            return_normalized_logprob=item.return_normalized_logprob,
            normalized_logprob_start_len=item.normalized_logprob_start_len,
        )

    @property
    def _max_prompt_tokens(self) -> int:
        return min(self.engine.context_len - 1, self.engine.max_total_num_token - 2)

    @property
    def _limits(self) -> str:
        return (
            f"at most {self.engine.context_len - 1} tokens for its context length of {self.engine.context_len} "
            f"and at most {self.engine.max_total_num_token - 2} for its pool of "
            f"{self.engine.max_total_num_token} tokens"
        )

    def _check_length(self, item: GenerateItem, num_tokens: int) -> None:
        if num_tokens == 0:
            raise bad_request(f"{item.param} must not be empty.", item.param)
        if num_tokens > self._max_prompt_tokens:
            raise bad_request(
                f"{item.param} has {num_tokens} tokens; this server takes {self._limits}.", item.param
            )

    def _clamp(self, item: GenerateItem, num_tokens: int) -> SamplingParams:
        """Parameters as the router gets them: no count larger than what can ever matter."""
        params = item.sampling_params
        room = min(self.engine.context_len, self.engine.max_total_num_token - 1) - num_tokens
        max_new_tokens = room if item.unlimited else min(params.max_new_tokens, room)
        return msgspec.structs.replace(
            params, max_new_tokens=max_new_tokens, top_k=min(params.top_k, self.engine.vocab_size)
        )

    # -- control requests --------------------------------------------------------------------------------

    async def flush_cache(self) -> dict[str, Any]:
        """Forget cached prefixes; the router's answer says whether it did."""
        return await self._ask(FlushCacheReq(uuid.uuid4().hex))

    async def get_internal_state(self) -> dict[str, Any]:
        """The engine's state, as numbers by name."""
        return await self._ask(GetInternalStateReq(uuid.uuid4().hex))

    async def _ask(self, message: FlushCacheReq | GetInternalStateReq) -> dict[str, Any]:
        if self._failure is not None:
            raise self._failure
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._control[message.rid] = answer
        self._sender.send(message)
        try:
            return await asyncio.wait_for(answer, CONTROL_TIMEOUT_S)
        except TimeoutError:
            raise ApiError(503, f"The engine did not answer within {CONTROL_TIMEOUT_S:.0f} s.") from None
        finally:
            del self._control[message.rid]

    # -- answers -----------------------------------------------------------------------------------------

    async def handle_loop(self, receiver: Receiver[TokenizerManagerInput]) -> None:
        """Hand every answer to who waits for it, for as long as the server lives."""
        while True:
            self.handle(await receiver.recv())

    def handle(self, message: TokenizerManagerInput) -> None:
        """One answer; those that nobody waits for any more are dropped."""
        if isinstance(message, ControlOut):
            future = self._control.get(message.rid)
            if future is not None and not future.done():
                future.set_result(message.payload)
            return
        try:
            self._deliver(message)
        except ValueError as error:
            logger.warning("dropped a batch that does not fit together: %s", error)

    def _deliver(self, batch: BatchStrOut) -> None:
        outputs = zip(batch.rids, batch.output_strs, batch.meta_info, batch.finish_reason, strict=True)
        for rid, text, meta_info, finish_reason in outputs:
            state = self.rid_to_state.get(rid)
            if state is not None and state.finish_reason is None:
                state.call.receive(state, text, meta_info, finish_reason)

    async def close(self) -> None:
        """End what the manager started: the processes that compile regexes."""
        await self._regex_compiler.close()

    def fail_all(self, message: str) -> None:
        """The server ends: everyone who waits, and everyone who still comes, gets an error (INV-LIVE)."""
        self._failure = ApiError(503, message)
        for call in {state.call for state in self.rid_to_state.values()}:
            call.fail(self._failure)
        for future in self._control.values():
            if not future.done():
                future.set_exception(self._failure)
