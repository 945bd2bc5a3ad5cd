"""`python -m tests.frontend.silent_server FLAGS`: the main process of v0.2 around an engine that answers nothing.

``SILENT_CONTROLLER=die`` ends the engine with its first message instead. Either way the warm-up gets no answer.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection

import msgspec

from stages.v0_2_cudagraph.managers.io_struct import EngineInput
from stages.v0_2_cudagraph.server_args import PortArgs, ServerArgs
from stages.v0_2_cudagraph.support.transport import Receiver

SIZES = {"max_total_num_token": 400, "max_req_input_len": 255, "context_len": 256, "vocab_size": 512}


def start(server_args: ServerArgs, port_args: PortArgs, ready: Connection) -> None:
    """Entry point with the signature of the real controller's."""
    receiver: Receiver[EngineInput] = Receiver(port_args.controller_endpoint, EngineInput)
    ready.send_bytes(msgspec.json.encode({"ok": True} | SIZES))
    while True:
        print("got", type(receiver.wait()).__name__, flush=True)
        if os.environ.get("SILENT_CONTROLLER") == "die":
            os._exit(7)


if __name__ == "__main__":
    import argparse

    from stages.v0_2_cudagraph.server import launch_server

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    args = ServerArgs.from_cli_args(parser.parse_args())
    sys.exit(launch_server(args, controller="tests.frontend.silent_server:start"))
