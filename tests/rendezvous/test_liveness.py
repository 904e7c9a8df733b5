"""Ranks that are silent: a process that is stopped, gone or out of reach has failed; one that is only busy has not."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

import gradsync as gs
from commands import wait_until
from gradsync.machine import machine_identity  # a peer on this machine has to say so; no public name gives it
from gradsync.rendezvous import connection, sockets
from gradsync.rendezvous.server import RendezvousServer
from rendezvous.clients import connect, failure_of, together
from rendezvous.peer import SECRET, FakeServer, Kind, Peer, accept_join, joining


@pytest.fixture
def programs(tmp_path):
    """Three processes whose name is no help to whoever reads /proc."""
    path = tmp_path / "x) T ("
    path.symlink_to(sys.executable)
    with contextlib.ExitStack() as stack:
        started = [subprocess.Popen([path, "-S", "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]
        for process in started:
            stack.enter_context(process)
            stack.callback(process.kill)
        yield started


@pytest.mark.slow  # ten seconds
def test_of_two_silent_ranks_the_one_whose_process_is_stopped_or_gone_has_failed(programs):
    """Gone, and its connection is still open: a child holds it. The other one, silent for longer, may only be busy."""
    busy, stopped, gone = programs

    def failure(process, number):
        with (
            RendezvousServer(3, secret=SECRET) as server,
            Peer.of_client(server.address) as first,
            Peer.of_client(server.address) as second,
        ):
            first.send(Kind.JOIN, *joining(1, 3, machine=machine_identity(), pid=busy.pid))
            second.send(Kind.JOIN, *joining(2, 3, machine=machine_identity(), pid=process.pid))
            with connect(server, 0, 3) as client:
                process.send_signal(number)
                return failure_of(client)

    for error in together(lambda: failure(stopped, signal.SIGSTOP), lambda: failure(gone, signal.SIGKILL)):
        assert type(error) is gs.RankFailed
        assert (error.rank, error.phase, error.was_silent) == (2, "running", True)


PARTITION = """
import subprocess, threading
from gradsync.errors import RendezvousError
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous import connection, sockets
from gradsync.rendezvous.server import RendezvousServer
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
with RendezvousServer(1, secret=b"s" * 16) as server:
    client = RendezvousClient.connect(server.address, secret=b"s" * 16, rank=0, world_size=1)
    client.set("key", b"value")
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    try:
        client.get("never", timeout_seconds=60)
    except RendezvousError as error:
        print(type(error).__name__)
    client.abandon()
"""


@pytest.mark.skipif(shutil.which("unshare") is None or shutil.which("ip") is None, reason="no unshare or ip here")
def test_a_cut_network_is_an_error_of_a_rank_that_waits(cli):
    """Loopback goes down under the connection, in a network namespace of its own."""
    if cli.program("unshare", "-rn", "ip", "link", "set", "lo", "up").code:
        pytest.skip("no network namespace can be made here")
    result = cli.program("unshare", "-rn", sys.executable, "-c", PARTITION)
    assert (result.code, result.out) == (0, "RendezvousError\n"), result.err


def break_off(stream):
    """Ends a connection in the way that the kernel does if bytes were unread: the other side cannot send any more."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.close()


@pytest.mark.parametrize(
    ("kind", "fields", "phase", "text"),
    [
        (Kind.FAIL, ("no data", None), "running", "failed: no data"),
        (Kind.LEAVE, ("", None, 0), "left", "orderly close"),
    ],
)
def test_what_a_rank_said_before_its_connection_broke_counts(cli, tmp_path, kind, fields, phase, text):
    """The server was held up, and writes to this rank before it reads."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(SECRET.hex())
    server = cli.start("serve", "--world-size", 2, "--secret-file", secret)
    address = server.stdout.readline().strip()
    with Peer.of_client(address) as peer:
        client, _ = together(lambda: connect(address, 0, 2), lambda: peer.join(1, 2))
        with client:
            server.send_signal(signal.SIGSTOP)
            client.announce_left("group", 1)
            time.sleep(0.2)  # it has sent this: the server is to write to the other rank first
            peer.send(kind, *fields)
            break_off(peer.stream)
            server.send_signal(signal.SIGCONT)
            with pytest.raises(gs.RankFailed, match=text) as caught:
                client.get("key", from_rank=1)
    assert (caught.value.rank, caught.value.phase) == (1, phase)
    server.terminate()
    assert server.result().code == 0


def test_what_the_server_said_before_the_connection_broke_counts(monkeypatch):
    """The rank was held up, and writes before it reads."""
    is_held, is_broken = threading.Event(), threading.Event()

    def serve(peer):
        accept_join(peer)
        is_held.wait(60)
        peer.send(Kind.FAILED, 0, 1, "running", [], "rank 1 died")
        break_off(peer.stream)
        is_broken.set()

    def hold(stream, unsent):
        is_held.set()
        is_broken.wait(60)
        sockets.send_some(stream, unsent)

    with FakeServer(serve) as server:
        client = connect(server.address)
        monkeypatch.setattr(connection, "send_some", hold)
        with pytest.raises(gs.RankFailed, match="rank 1 died"):
            client.set("key", b"value")
        client.abandon()


STEPS = """
import sys, time
import numpy as np
import gradsync as gs
from pathlib import Path
with gs.init_process_group("shm") as comm:
    begun = time.monotonic()
    comm.barrier()
    Path(sys.argv[1], f"begun {comm.rank}").touch()
    while comm.all_reduce(np.array(time.monotonic() - begun), "min") < 15.0:
        time.sleep(0.02)
    Path(sys.argv[1], f"ended {comm.rank}").touch()
"""


@pytest.mark.slow
def test_a_launcher_that_is_stopped_ends_no_job_that_does_not_need_it(cli, script, tmp_path):
    process = cli.start("run", "-n", 2, script(STEPS), tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("begun *"))) == 2)
    process.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: len(list(tmp_path.glob("ended *"))) == 2 or len(cli.processes()) < 3)
        assert len(list(tmp_path.glob("ended *"))) == 2
    finally:
        process.send_signal(signal.SIGCONT)
    assert process.result().code == 0


def test_a_stopped_server_delays_no_deadline_and_no_report(cli):
    process = cli.start("serve", "--world-size", 1, "--secret-file", "-", stdin=subprocess.PIPE)
    process.stdin.write(SECRET.hex() + "\n")
    process.stdin.flush()
    with connect(process.stdout.readline().strip()) as client:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(gs.RendezvousError):
            client.get("key", timeout_seconds=0.1)
        client.report_failure("ValueError: 7")  # returns at once
        assert client.has_failed()
        client.abandon()
        process.kill()
        with pytest.raises(gs.CommunicatorClosed):
            client.check()


def test_the_notice_says_that_the_missing_rank_was_stopped(cli, script):
    launcher = cli.start(
        *("run", "-n", 2),
        script("""
            import os, signal, numpy as np, gradsync as gs
            comm = gs.init_process_group("shm")
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            comm.all_reduce(np.ones(1))
        """),
    )
    assert "was stopped (SIGSTOP?)" in launcher.read_until("rank 0 has waited", "stderr")
    launcher.terminate()
    launcher.result()
