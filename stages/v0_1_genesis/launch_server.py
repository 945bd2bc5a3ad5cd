"""`python -m stages.v0_1_genesis.launch_server --model-path FOLDER`: the command that starts a server.

Everything is imported late: child processes import this module again when they start, and must stay light.
"""

from __future__ import annotations

import os
import signal
import sys


def main(argv: list[str]) -> int:
    """Parse the command line and serve; returns the exit code."""
    import argparse

    from . import STAGE
    from .server import launch_server
    from .server_args import ServerArgs

    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.launch_server",
        usage="%(prog)s --model-path FOLDER [FLAGS]",
        description=f"Start a Strata {STAGE} server.",
    )
    ServerArgs.add_cli_args(parser)
    return launch_server(ServerArgs.from_cli_args(parser.parse_args(argv)))


if __name__ == "__main__":
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # until `launch_server` takes over there is nothing to clear up
        signal.signal(number, lambda *_: os._exit(0))
    sys.exit(main(sys.argv[1:]))
