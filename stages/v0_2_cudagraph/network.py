"""TCP between the ranks and nodes of one server: where to listen, and on which interface. Any process; no state."""

from __future__ import annotations

import socket
import sys

LOOPBACK = "127.0.0.1"

SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface, which is at bytes 20 to 24 of what it returns."""


def listen(address: tuple[str, int]) -> socket.socket:
    """A socket that listens at ``address`` (host, port) and on no other interface; raises ``OSError``."""
    family, _, _, _, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    return socket.create_server(resolved[:2], family=family)


def interface_towards(host: str) -> str | None:
    """Name of the interface over which this machine reaches ``host``; None where that can't be told.

    Left to themselves libraries take the interface of the machine's own name, which the other nodes may not see.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: it only asks for the route
        own = probe.getsockname()[0]
        if own in (LOOPBACK, "::1"):
            return "lo0" if sys.platform == "darwin" else "lo"
        if sys.platform != "linux" or family != socket.AF_INET:
            return None
        return next((name for _, name in socket.if_nameindex() if _ipv4_of(name, probe) == own), None)


def _ipv4_of(interface: str, any_socket: socket.socket) -> str | None:
    """The interface's first IPv4 address; None without one."""
    import fcntl  # not on every platform

    request = interface.encode().ljust(256, b"\0")
    try:
        return socket.inet_ntoa(fcntl.ioctl(any_socket, SIOCGIFADDR, request)[20:24])
    except OSError:
        return None
