import http.server
import socket
import socketserver
from pathlib import Path

import pytest

import gradsync as gs

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


def test_the_kernel_gives_it_to_nobody_unasked():
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if high - low > 60_000:
        pytest.skip("the kernel uses all ports here")
    assert not any(low <= gs.free_port() <= high for _ in range(20))
