"""`python -m tests.frontend.fake_server FLAGS`: the real main and detokenizer around the fake router."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import argparse

    from stages.v0_1_genesis.server import launch_server
    from stages.v0_1_genesis.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    server_args = ServerArgs.from_cli_args(parser.parse_args())
    sys.exit(launch_server(server_args, router="tests.frontend.fake_router:start"))
