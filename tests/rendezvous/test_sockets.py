"""Addresses as text, there and back."""

from __future__ import annotations

import socket

import pytest

from gradsync.arguments import join_address, parse_address, port_beside
from gradsync.errors import InvalidArgument
from gradsync.rendezvous.sockets import bind_listener, format_address


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [("127.0.0.1", 4000, "127.0.0.1:4000"), ("node0", 1, "node0:1"), ("::1", 65535, "[::1]:65535")],
)
def test_an_address_there_and_back(host: str, port: int, address: str) -> None:
    assert join_address(host, port) == address
    assert parse_address(address) == (host, port)


@pytest.mark.parametrize(
    "address",
    ["", "node0", "node0:", ":4000", "node0:0", "node0:65536", "node0:4e3", "::1:4000", "node0:４０", 4000],
)
def test_what_is_no_address(address: object) -> None:
    with pytest.raises(InvalidArgument, match="an address needs"):
        parse_address(address)  # type: ignore[arg-type]


@pytest.mark.parametrize("port", [1, 4000, 65534, 65535])
def test_the_port_beside_is_another_port(port: int) -> None:
    assert abs(port_beside(port) - port) == 1
    assert port_beside(port) <= 65535


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_listener_tells_its_address(host: str) -> None:
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with bind_listener(host, 0) as listener:
        assert format_address(listener) == join_address(host, listener.getsockname()[1])


@pytest.mark.parametrize(("host", "port"), [("", 4000), ("127.0.0.1", -1), ("127.0.0.1", 65536)])
def test_what_cannot_be_bound_is_refused(host: str, port: int) -> None:
    with pytest.raises(InvalidArgument, match="a host and a port from 0 to 65535"):
        bind_listener(host, port)
