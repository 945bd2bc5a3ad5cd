"""Takes the TCP port of a server. Free of any HTTP library, since main does it first of all."""

from __future__ import annotations

import socket


def bind_listener(host: str, port: int) -> socket.socket:
    """Take the port now, so that a taken one is known before a model loads; port 0 takes a free one.

    Raises ``ValueError`` with one clear line. Nothing listens yet: clients are refused until the server is ready.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"--host {host} is no known address: {error.strerror}.") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ValueError(
            f"--port {port} can't be used on {host}: {error.strerror}. Take another one, or --port 0."
        ) from error
    return listener
