"""Addresses of ranks and nodes: every socket stays on the interface that leads to where they meet."""

from __future__ import annotations

import socket

import psutil
import pytest

from stages.v0_2_cudagraph.network import interface_towards, listen
from stages.v0_2_cudagraph.server import _free_ports

IPV4 = [
    (address.address, name)
    for name, addresses in psutil.net_if_addrs().items()
    for address in addresses
    if address.family == socket.AF_INET
]


@pytest.mark.parametrize(("address", "name"), IPV4)
def test_an_address_of_this_machine_is_reached_over_its_interface(address: str, name: str) -> None:
    expected = "lo" if address.startswith("127.") else name
    assert interface_towards(address) == expected


def test_ipv6_and_names() -> None:
    assert interface_towards("localhost") == interface_towards("::1") == "lo"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_it_listens_there_and_nowhere_else(host: str) -> None:
    with listen((host, 0)) as listener:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")
        socket.create_connection((host, listener.getsockname()[1])).close()


def test_no_two_replicas_get_one_port() -> None:
    """So many that ports taken one after the other would repeat."""
    ports = _free_ports(600)
    assert len(set(ports)) == 600
