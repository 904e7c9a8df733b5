import contextlib
import os
import secrets
import socket
import stat

import pytest

import gradsync as gs
from gradsync import environment
from gradsync.launching import hosting
from gradsync.launching.hosting import launcher_endpoint
from gradsync.rendezvous.secret_files import Endpoint

SECRET = secrets.token_hex(32)


@pytest.fixture(autouse=True)
def _own_runtime_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(environment, "_secret", None)


def first(port=0, host="127.0.0.1", has_others=True):
    return launcher_endpoint(host, port, 0, has_others=has_others)


def second(port, host="127.0.0.1"):
    return launcher_endpoint(host, port, 1, has_others=True)


def secret_files(tmp_path):
    return sorted(path for path in tmp_path.iterdir() if path.suffix == ".secret")


def test_launchers_of_one_machine_leave_the_secret_in_a_private_file(tmp_path):
    port = gs.free_port()
    with first(port) as (hosted, _):
        assert hosted.address == f"127.0.0.1:{port}"
        (path,) = secret_files(tmp_path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with second(port) as (found, listener):
            assert (found, listener) == (Endpoint(hosted.address, b""), None)
        assert secret_files(tmp_path) == [path]
        assert SECRET not in repr(hosted)
    assert secret_files(tmp_path) == []


def test_a_run_of_one_machine_is_left_to_the_supervisor(tmp_path):
    with first(has_others=False) as (hosted, _):
        assert hosted is None
        assert secret_files(tmp_path) == []


@pytest.mark.parametrize("master_ip", ["0.0.0.0", "192.0.2.1", "node0", "::"])
@pytest.mark.parametrize("make", [first, second])
def test_no_secret_where_other_machines_can_come_is_refused(monkeypatch, make, master_ip):
    monkeypatch.setattr(hosting, "bind_listener", None)
    with (
        pytest.raises(gs.AuthenticationError, match="needs a secret.*GRADSYNC_SECRET_FILE.*or set GRADSYNC_SECRET"),
        make(4000, master_ip),
    ):
        pass


@pytest.mark.parametrize("master_ip", ["0.0.0.0", "127.0.0.1"])
def test_secret_of_the_environment(monkeypatch, tmp_path, master_ip):
    path = tmp_path / "mine"
    path.write_text(SECRET)
    path.chmod(0o600)
    monkeypatch.setenv("GRADSYNC_SECRET_FILE", str(path))
    port = gs.free_port()
    with (
        first(port, host=master_ip) as (hosted, _),
        second(port) as (found, _),
    ):
        assert hosted.secret == found.secret == bytes.fromhex(SECRET)
        assert secret_files(tmp_path) == []


def test_ipv6(monkeypatch):
    port = gs.free_port()
    try:
        socket.create_server(("::1", port), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 loopback: {error}")
    with (
        first(port, host="::1") as (hosted, _),
        second(port, host="::1") as (found, _),
    ):
        assert hosted.address == found.address == f"[::1]:{port}"


def test_a_port_that_the_kernel_chose_is_told(caplog):
    with first() as (hosted, _):
        port = hosted.address.rpartition(":")[2]
    assert f"pass port={port} to the launchers of the other nodes" in caplog.text


def test_nothing_is_left_behind(tmp_path):
    before = os.listdir("/proc/self/fd")
    with contextlib.suppress(ZeroDivisionError), first():
        _ = 1 / 0
    assert os.listdir("/proc/self/fd") == before
    assert secret_files(tmp_path) == []
