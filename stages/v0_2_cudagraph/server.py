"""`launch_server`, the whole life of a server's main process, and `Runtime`, which starts one from Python.

Main checks everything it can, starts the children, serves (`serving`), and ends whatever it started.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import httpx
import msgspec

from .hf_transformers_utils import Tokenizer, check_model_folder, get_tokenizer
from .managers.engine_info import EngineInfo
from .model_config import ModelConfig
from .node_server import run_node
from .server_args import PortArgs, ServerArgs
from .support.listen import bind_listener
from .support.logs import configure_logging
from .support.processes import ProcessGroup, StartError
from .support.transport import ipc_endpoint, new_socket_dir, remove_socket_dir

logger = logging.getLogger(__name__)

CONTROLLER_SINGLE = f"{__package__}.managers.controller.manager_single:start_controller_process"
CONTROLLER_MULTI = f"{__package__}.managers.controller.manager_multi:start_controller_process"
DETOKENIZER = f"{__package__}.managers.detokenizer_manager:start_detokenizer_process"

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

ASK_AGAIN_S = 0.5
RUNTIME_START_TIMEOUT_S = 300.0
RUNTIME_STOP_TIMEOUT_S = 10.0
LOG_LINES_SHOWN = 20


def launch_server(server_args: ServerArgs, controller: str | None = None) -> int:
    """Serve until told to end; returns the exit code: 0 asked to end, 1 failed, 2 wrong arguments.

    ``controller`` names the controller's entry point, so that tests can put a stand-in there; by default it is
    that of one engine or of several replicas.
    """
    controller = controller or (CONTROLLER_MULTI if server_args.dp_size > 1 else CONTROLLER_SINGLE)
    configure_logging("main", server_args.log_level)
    for number in (signal.SIGINT, signal.SIGTERM):  # until the event loop has handlers of its own
        signal.signal(number, _on_signal)
    try:
        return _check_and_run(server_args, controller)
    except (StartError, OSError) as error:
        logger.error("%s", error)
        return EXIT_FAILED
    except _AskedToEnd:
        _ignore_signals()
        return EXIT_OK


def _check_and_run(server_args: ServerArgs, controller: str) -> int:
    """Check what can be checked, then serve; whatever was started or made is gone on return."""
    try:
        tokenizer = _check(server_args)
        if server_args.node_rank:
            return _run_node(server_args)
        listener = bind_listener(server_args.host, server_args.port)
    except ValueError as error:
        logger.error("%s", error)
        return EXIT_USAGE
    server_args = replace(server_args, port=listener.getsockname()[1])
    port_args = _new_ports(server_args.dp_size)
    group = ProcessGroup()
    try:
        return _run(server_args, port_args, tokenizer, listener, group, controller)
    finally:
        _ignore_signals()
        listener.close()
        group.stop()
        remove_socket_dir(port_args.tokenizer_endpoint)


def _check(server_args: ServerArgs) -> Tokenizer:
    """Find every mistake that can be found before a process starts; raises ``ValueError``."""
    server_args.check()
    check_model_folder(server_args.model_path, server_args.tokenizer_path, server_args.load_format)
    model_config = ModelConfig(server_args.model_path, server_args.context_length)
    model_config.check_tp_size(server_args.tp_size)
    tokenizer = get_tokenizer(server_args.tokenizer_path, server_args.model_path)
    if server_args.chat_template is not None:
        tokenizer.read_chat_template(server_args.chat_template)
    return tokenizer


def _run_node(server_args: ServerArgs) -> int:
    """The same on a node that is not node 0: it has ranks only, and ends with the server."""
    group = ProcessGroup()
    try:
        logger.error("%s; this node ends", run_node(server_args, group))
        return EXIT_FAILED
    finally:
        _ignore_signals()
        group.stop()


def _new_ports(dp_size: int) -> PortArgs:
    socket_dir = new_socket_dir()
    return PortArgs(
        controller_endpoint=ipc_endpoint(socket_dir, "controller"),
        detokenizer_endpoint=ipc_endpoint(socket_dir, "detokenizer"),
        tokenizer_endpoint=ipc_endpoint(socket_dir, "tokenizer"),
        nccl_ports=_free_ports(dp_size),
    )


def _run(
    server_args: ServerArgs,
    port_args: PortArgs,
    tokenizer: Tokenizer,
    listener: socket.socket,
    group: ProcessGroup,
    controller: str,
) -> int:
    """Start the children and serve; the caller ends whatever is left."""
    logger.info("loading %s", server_args.model_path)
    # The key stays in main: children neither need it nor could they leak it.
    child_args = (replace(server_args, api_key=None), port_args)
    for name, target in (("controller", controller), ("detokenizer", DETOKENIZER)):
        group.start(name, target, child_args, port_args.tokenizer_endpoint, server_args.log_level)
    from .serving import run_until_ended  # brings in FastAPI: now, while the children load

    engine = msgspec.convert(group.wait_ready()["controller"], EngineInfo)
    logger.info(
        "engine ready: %d tokens in the pool, context length %d, %s %s",
        engine.max_total_num_token,
        engine.context_len,
        engine.device,
        engine.dtype,
    )
    return run_until_ended(server_args, port_args, tokenizer, engine, listener, group)


class _AskedToEnd(BaseException):
    """A signal came. Not KeyboardInterrupt: Python may end by SIGINT although somebody caught that."""


def _on_signal(number: int, frame: object) -> NoReturn:
    """Ask for the end, and again soon: raised inside a library's callback, the first exception may be swallowed."""
    signal.signal(signal.SIGALRM, _on_signal)
    signal.setitimer(signal.ITIMER_REAL, ASK_AGAIN_S)
    raise _AskedToEnd


def _ignore_signals() -> None:
    """A second Ctrl-C must not stop the clearing up."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


class Runtime:
    """Starts a server in a process of its own and returns when it is healthy.

    Takes `ServerArgs`' fields by name; without ``port`` it takes a free one. Raises ``RuntimeError``, with the
    last lines of the server's log, if the server ends instead of becoming ready.
    """

    def __init__(self, model_path: str, **server_args: Any) -> None:
        server_args.setdefault("port", _free_port())
        self.server_args = ServerArgs(model_path=model_path, **server_args)
        self.url = self.server_args.url
        self._log = tempfile.TemporaryFile(prefix="strata-runtime-")  # noqa: SIM115 (closed by shutdown)
        self._client = httpx.Client(base_url=self.url, timeout=None, headers=self._headers(), trust_env=False)
        self._process = self._start()
        atexit.register(self.shutdown)
        try:
            self._wait_until_healthy()
        except BaseException:
            self.shutdown()
            raise

    def generate(
        self,
        prompt: str | list[str],
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        return_logprob: bool | list[bool] = False,
        logprob_start_len: int | list[int] = 0,
        top_logprobs_num: int | list[int] = 0,
    ) -> Any:
        """Output of `/generate`: one dict with ``text`` and ``meta_info``, or a list of them for a list or n > 1."""
        body = {
            "text": prompt,
            "sampling_params": sampling_params,
            "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len,
            "top_logprobs_num": top_logprobs_num,
        }
        response = self._client.post("/generate", json=body)
        if response.status_code != 200:
            raise RuntimeError(response.json()["error"]["message"])
        return response.json()

    def shutdown(self) -> None:
        """End the server and wait until it is gone. May be called twice."""
        atexit.unregister(self.shutdown)
        self._client.close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(RUNTIME_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _headers(self) -> dict[bytes, bytes]:
        key = self.server_args.api_key  # in UTF-8, as the server compares it; httpx takes text for ASCII
        return {b"authorization": f"Bearer {key}".encode()} if key else {}

    def _start(self) -> subprocess.Popen[bytes]:
        # The server imports this package from where it was imported here.
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", f"{__package__}.launch_server", *_to_flags(self.server_args)]
        return subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path}
        )

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + RUNTIME_START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                code = self._process.returncode
                raise RuntimeError(f"The server ended with exit code {code}:\n{self._log_tail()}")
            try:
                if self._client.get("/health", timeout=5.0).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise RuntimeError(
            f"The server was not ready after {RUNTIME_START_TIMEOUT_S:.0f} s:\n{self._log_tail()}"
        )

    def _log_tail(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES_SHOWN:])


def _to_flags(server_args: ServerArgs) -> list[str]:
    """The command line that gives these arguments; those at their default are left out."""
    flags = []
    for field in fields(server_args):
        value = getattr(server_args, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if value == default:
            continue
        flags.append("--" + field.name.replace("_", "-"))
        if isinstance(value, list):
            flags += value
        elif not isinstance(value, bool):
            flags.append(str(value))
    return flags


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _free_ports(count: int) -> list[int]:
    """Different ones: all are held at once, as one that was let go might come again."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]
