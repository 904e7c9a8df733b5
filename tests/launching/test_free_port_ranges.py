import os
import resource
import socket

import pytest

import gradsync as gs
from gradsync.launching import free_port as ports


@pytest.fixture
def only_port(monkeypatch):
    """Leaves one port to choose from."""
    with ports.reserved_port() as port:
        pass
    monkeypatch.setattr(ports, "_ports_to_try", lambda: range(port, port + 1))
    return port


@pytest.mark.parametrize(
    ("kernel_range", "expected"),
    [
        ("32768\t60999\n", range(61000, 65536)),
        ("10000 65535", range(5904, 10000)),
        ("3000 65000", range(1024, 3000)),
        ("2000 65000", range(2000, 65001)),  # neither side leaves enough
        ("1024 65535", range(1024, 65536)),
        ("1 65535", range(1024, 65536)),
        (None, range(61000, 65536)),
        ("garbage", range(61000, 65536)),
    ],
)
def test_ports_beside_those_of_the_kernel(monkeypatch, tmp_path, kernel_range, expected):
    monkeypatch.setattr(ports, "_KERNEL_RANGE", tmp_path / "range")
    if kernel_range is not None:
        (tmp_path / "range").write_text(kernel_range)
    assert ports._ports_to_try() == expected


def test_the_newest_ports_are_kept():
    before = len(os.listdir("/proc/self/fd")) - len(ports._kept)
    for _ in range(ports._MOST_KEPT + 5):
        gs.free_port()
    assert len(os.listdir("/proc/self/fd")) - before == ports._MOST_KEPT


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
        with pytest.raises(OSError, match=f"none of the ports {only_port} to {only_port} is free"):
            gs.free_port()
    with ports.reserved_port() as port:
        assert port == only_port
