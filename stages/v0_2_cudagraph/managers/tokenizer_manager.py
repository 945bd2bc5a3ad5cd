"""The main process' end of the ring: prompts become requests, and texts find their way back to who waits.

One TokenizerManager lives as long as the server, on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec

from ..constrained.compiler import CompilerBusyError, RegexCompiler
from ..constrained.regex_index import RegexIndex
from ..hf_transformers_utils import Tokenizer
from ..support.http_errors import ApiError, bad_request
from ..support.transport import Receiver, Sender
from .call import Call, ReqState
from .engine_info import EngineInfo
from .io_struct import (
    AbortReq,
    BatchStrOut,
    ControlOut,
    FlushCacheReq,
    GetInternalStateReq,
    TokenizedGenerateReqInput,
    TokenizerManagerInput,
)
from .parallel_sampling import samples_of, share_prefills, warming_request
from .request_tokenizer import GenerateItem, RequestTokenizer

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 60.0


class TokenizerManager:
    """Sends tokenized prompts to the engine, and hands outputs to the calls that wait for them.

    A request has two names: the client's ``rid``, unique among those in flight, and a fresh one inside the
    ring, so that a late output of an aborted request can never reach a newer one of the same name.
    """

    def __init__(self, tokenizer: Tokenizer, engine: EngineInfo, sender: Sender) -> None:
        self.tokenizer = tokenizer
        self.engine = engine
        self._request_tokenizer = RequestTokenizer(tokenizer, engine)
        self._sender = sender
        self._regex_compiler = RegexCompiler(tokenizer, engine.vocab_size)
        self.rid_to_state: dict[str, ReqState] = {}
        self._client_rids: set[str] = set()
        self._control: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._failure: ApiError | None = None

    # -- requests ----------------------------------------------------------------------------------------

    async def tokenize(self, items: Sequence[GenerateItem], stream: bool) -> list[TokenizedGenerateReqInput]:
        """Check every item and give it its token ids; raises `ApiError` 400 naming the first field at fault."""
        requests = await self._request_tokenizer.tokenize(items, stream)
        for request in requests:
            if (regex := request.sampling_params.regex) is not None:
                request.regex_index = await self._compile_regex(regex)
        return requests

    @asynccontextmanager
    async def open_call(self, requests: Sequence[TokenizedGenerateReqInput]) -> AsyncIterator[Call]:
        """Send ``requests``, each n times where it wants n answers, after one prefill of each that all share."""
        n = requests[0].sampling_params.n
        if n == 1:
            with self._send(requests) as call:
                yield call
            return
        with self._send([warming_request(request) for request in requests]) as warming:
            warmed = await warming.results()
        with self._send([sample for request in requests for sample in samples_of(request)], n) as call:
            share_prefills(warmed, call.states, n)
            yield call

    @contextmanager
    def _send(self, requests: Sequence[TokenizedGenerateReqInput], n: int = 1) -> Iterator[Call]:
        """Send ``requests``, whose rids are the client's; on leaving, whatever still runs is aborted (INV-FREE)."""
        if self._failure is not None:
            raise self._failure
        rids = [request.rid for request in requests]
        if len(set(rids)) < len(rids) or not self._client_rids.isdisjoint(rids):
            raise bad_request("rid must be unique among the requests in flight.", "rid")
        call = Call(rids, any(request.stream for request in requests), n)
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

    async def _compile_regex(self, regex: str) -> RegexIndex:
        try:
            return await self._regex_compiler.compile(regex)
        except ValueError as error:
            raise bad_request(str(error), "regex") from None
        except CompilerBusyError as error:
            raise ApiError(503, f"regex: {error}", "regex") from None

    # -- control requests --------------------------------------------------------------------------------

    async def flush_cache(self) -> dict[str, Any]:
        """Forget cached prefixes; the engine's answer says whether it did."""
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
        if len({len(parallel) for parallel in msgspec.structs.astuple(message)}) != 1:
            logger.warning("dropped a batch whose lists have different lengths")
            return
        self._deliver(message)

    def _deliver(self, batch: BatchStrOut) -> None:
        parallel = (batch.rids, batch.output_strs, batch.meta_info, batch.logprobs, batch.finish_reason)
        for rid, text, meta_info, logprobs, finish_reason in zip(*parallel, strict=True):
            state = self.rid_to_state.get(rid)
            if state is not None and state.finish_reason is None:
                state.call.receive(state, text, meta_info, logprobs, finish_reason)

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
