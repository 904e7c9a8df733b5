"""gs.free_port: a server can bind it, and nobody else is given it."""

import http.server
import os
import resource
import socket
import sys

import pytest

import gradsync as gs

SERVERS = {
    "one family": lambda port: socket.create_server(("127.0.0.1", port)),
    "both families": lambda port: socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True),
    "reuse_port": lambda port: socket.create_server(("", port), reuse_port=True),
    "http.server": lambda port: http.server.ThreadingHTTPServer(("", port), http.server.SimpleHTTPRequestHandler),
}


@pytest.mark.parametrize("server", SERVERS)
def test_a_server_that_reuses_addresses_can_bind_it(server):
    if server == "both families" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    port = gs.free_port()
    for _ in range(2):
        with SERVERS[server](port):
            pass


def test_the_newest_ports_differ_and_few_descriptors_keep_them():
    assert len({gs.free_port() for _ in range(64)}) == 64
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        gs.free_port()
    assert len(os.listdir("/proc/self/fd")) == before


NEIGHBOUR = """
import socket
low, high = map(int, open("/proc/sys/net/ipv4/ip_local_port_range").read().split())
holders = []
try:
    while True:
        holders.append(socket.socket())
        holders[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holders[-1].bind(("127.0.0.1", 0))
except OSError:
    print(len(holders), *(holder.getsockname()[1] for holder in holders[:-1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a network of its own")
def test_who_asks_for_any_port_never_gets_it(cli):
    """Asked for in a network of its own with 200 ports, by a program that takes all that are left."""
    program = f"""
import os, subprocess, sys
import gradsync as gs
with open("/proc/sys/net/ipv4/ip_local_port_range", "w") as file:
    file.write("40000 40199")
own = [gs.free_port() for _ in range(50)]
found = subprocess.run([sys.executable, "-c", {NEIGHBOUR!r}], capture_output=True, text=True, check=True).stdout
print(len(found.split()), set(own) & set(map(int, found.split()[1:])))
"""
    assert cli.program("unshare", "--net", sys.executable, "-c", program) == (0, "151 set()\n", "")


def test_too_many_open_files_are_not_taken_for_ports_in_use():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as probe:
        lowest = probe.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            gs.free_port()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
