"""The event loop of the main process: HTTP on one side, the ring of processes on the other.

Runs from the moment the engine is ready until a signal comes or a child dies. Importing this module brings in
FastAPI, so main does it while its children load.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket

from .hf_transformers_utils import Tokenizer
from .http_app import create_app
from .managers.engine_info import EngineInfo
from .managers.io_struct import TokenizerManagerInput
from .managers.request_tokenizer import GenerateItem
from .managers.tokenizer_manager import TokenizerManager
from .sampling_params import SamplingParams
from .server_args import PortArgs, ServerArgs
from .support.http_errors import ApiError
from .support.http_server import HttpServer, loop_factory
from .support.processes import Child, ProcessGroup
from .support.transport import Receiver, Sender

logger = logging.getLogger(__name__)

GRACE_AFTER_DEATH_S = 1.0
"""After a child's death clients hear of it for so long before main ends too (INV-LIVE: 5 s in all)."""

WARM_UP = GenerateItem(
    "The capital city of France is", SamplingParams(max_new_tokens=8, temperature=0.0), "text"
)

SIGNAL_TO_ALL_S = 0.05
"""Who ends a service often signals all its processes at once: main waits so long for its own signal before it
takes a child's end for an accident."""


def run_until_ended(
    server_args: ServerArgs,
    port_args: PortArgs,
    tokenizer: Tokenizer,
    engine: EngineInfo,
    listener: socket.socket,
    group: ProcessGroup,
) -> int:
    """Serve on ``listener``; returns main's exit code: 0 if it was asked to end, 1 if a child died."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(server_args, port_args, tokenizer, engine, listener, group))


async def _serve(
    server_args: ServerArgs,
    port_args: PortArgs,
    tokenizer: Tokenizer,
    engine: EngineInfo,
    listener: socket.socket,
    group: ProcessGroup,
) -> int:
    """Answer HTTP until a signal comes or a child dies."""
    receiver: Receiver[TokenizerManagerInput] = Receiver(port_args.tokenizer_endpoint, TokenizerManagerInput)
    manager = TokenizerManager(tokenizer, engine, Sender(port_args.controller_endpoint))
    http_server = HttpServer(create_app(manager, server_args, group.is_alive))
    loop = asyncio.get_running_loop()
    deaths: list[Child] = []

    def on_death(sentinel: int, child: Child) -> None:
        loop.remove_reader(sentinel)
        loop.call_later(SIGNAL_TO_ALL_S, end_after_death, child)

    def end_after_death(child: Child) -> None:
        if http_server.should_exit:
            return
        child.process.join()
        logger.error("%s; ending the server", child.fate)
        deaths.append(child)
        manager.fail_all(f"The server is ending: {child.fate}.")
        loop.call_later(GRACE_AFTER_DEATH_S, http_server.end)

    def on_signal() -> None:
        logger.info("ending")
        manager.fail_all("The server is ending.")
        http_server.end()

    for sentinel, child in group.sentinels():
        loop.add_reader(sentinel, on_death, sentinel, child)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    answers = asyncio.create_task(manager.handle_loop(receiver))
    await _warm_up(manager, server_args.dp_size)
    announcement = asyncio.create_task(_announce(http_server, server_args))
    await http_server.serve(sockets=[listener])
    for task in (answers, announcement):
        task.cancel()
    for sentinel, _ in group.sentinels():
        loop.remove_reader(sentinel)
    await manager.close()
    return 1 if deaths else 0


async def _warm_up(manager: TokenizerManager, dp_size: int) -> None:
    """Send every replica a request round the ring before a client can: what is made on first use is made now."""
    try:
        requests = await manager.tokenize([WARM_UP] * dp_size, stream=False)
        async with manager.open_call(requests) as call:
            await call.results()
    except ApiError as error:  # a pool too small for it may be large enough for others
        logger.warning("the warm-up request failed: %s", error.message)


async def _announce(http_server: HttpServer, server_args: ServerArgs) -> None:
    """Say, once requests are taken, where and how to send one."""
    while not http_server.started:
        await asyncio.sleep(0.01)
    body = json.dumps({"text": "The capital of France is", "sampling_params": {"max_new_tokens": 16}})
    key = " -H 'authorization: Bearer KEY'" if server_args.api_key else ""
    logger.info("ready at %s", server_args.url)
    logger.info(
        "try: curl %s/generate%s -H 'content-type: application/json' -d '%s'", server_args.url, key, body
    )
