"""gs.free_port: any server can bind it, and nobody else is given it."""

import http.server
import os
import resource
import socket
import socketserver
from pathlib import Path

import pytest

import gradsync as gs
from gradsync.launching import free_port as ports

SERVERS = {
    "without SO_REUSEADDR": lambda port: socketserver.TCPServer(("", port), socketserver.BaseRequestHandler),
    "create_server": lambda port: socket.create_server(("127.0.0.1", port)),
    "both families": lambda port: socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True),
    "reuse_port": lambda port: socket.create_server(("", port), reuse_port=True),
    "http.server": lambda port: http.server.ThreadingHTTPServer(("", port), http.server.SimpleHTTPRequestHandler),
}


@pytest.mark.parametrize("server", SERVERS)
def test_every_kind_of_server_can_bind_it(server):
    if server == "both families" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with SERVERS[server](gs.free_port()):
        pass


def test_ports_differ_are_not_the_kernels_and_few_descriptors_keep_them():
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = [gs.free_port() for _ in range(70)]
    assert len(set(found[-60:])) == 60
    if high - low <= 60_000:  # otherwise the kernel uses all ports
        assert not any(low <= port <= high for port in found)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        gs.free_port()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def only_port(monkeypatch):
    """Leaves one port to choose from, by private names: the machine has more than a test can take."""
    port = gs.free_port()
    monkeypatch.setattr(ports, "_ports_to_try", lambda: range(port, port + 1))
    while ports._kept:
        os.close(ports._kept.pop())
    return port


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, ""), (socket.AF_INET6, "::1")]
)
@pytest.mark.parametrize("listens", [True, False])
def test_a_port_in_use_is_not_given(only_port, family, host, listens):
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with socket.socket(family) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, only_port))
        if listens:
            taken.listen()
        with pytest.raises(OSError, match="is free"):
            gs.free_port()
    assert gs.free_port() == only_port
    with pytest.raises(OSError, match="is free"):
        gs.free_port()  # that one is kept for its caller


def test_too_many_open_files_are_not_taken_for_ports_in_use():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as probe:
        lowest = probe.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            gs.free_port()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(
    ("kernel_range", "expected"),
    [
        ("32768\t60999\n", range(61000, 65536)),
        ("10000 65535", range(5904, 10000)),
        ("3000 65000", range(1024, 3000)),
        ("2000 65000", range(2000, 65001)),  # neither side leaves enough
        ("1 65535", range(1024, 65536)),
        (None, range(61000, 65536)),
        ("garbage", range(61000, 65536)),
    ],
)
def test_ports_come_from_beside_those_of_the_kernel(kernel_range, expected, monkeypatch, tmp_path):
    """Private, as the kernel's own range is that of this machine."""
    monkeypatch.setattr(ports, "_KERNEL_RANGE", tmp_path / "range")
    if kernel_range is not None:
        (tmp_path / "range").write_text(kernel_range)
    assert ports._ports_to_try() == expected
