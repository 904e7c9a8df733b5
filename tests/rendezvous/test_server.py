"""The server: binding, stopping, hostile connections, killed processes; nothing left behind."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from rendezvous_ranks import JOIN_SECONDS, SECRET, connect, connect_all, run_ranks, run_threads, server_process

from contract import wait_until
from gradsync.errors import InvalidArgument, RankFailed, RendezvousError
from gradsync.rendezvous import server as server_module
from gradsync.rendezvous.connection import Connection
from gradsync.rendezvous.frames import THE_WORLD, Action, Event, FrameType, Received
from gradsync.rendezvous.handshake import NONCE_BYTES, ClientHandshake
from gradsync.rendezvous.server import RendezvousServer


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_port_in_use_names_the_port() -> None:
    with RendezvousServer(1, secret=SECRET) as first:
        port = int(first.address.rpartition(":")[2])
        with pytest.raises(RendezvousError, match=rf"port {port} on 127.0.0.1 is in use; use port 0 for a free port$"):
            RendezvousServer(1, secret=SECRET, port=port)
    with RendezvousServer(1, secret=SECRET, port=port) as again:
        assert again.address == f"127.0.0.1:{port}"


@pytest.mark.parametrize(
    "options",
    [
        {"port": -1},
        {"port": 65536},
        {"world_size": 0},
        {"world_size": 2.0},
    ],
)
def test_bad_arguments(options) -> None:
    with pytest.raises(InvalidArgument):
        RendezvousServer(**{"world_size": 1, "secret": SECRET, **options})


def test_host_that_is_not_ours() -> None:
    with pytest.raises(RendezvousError, match=r"192\.0\.2\.1"):
        RendezvousServer(1, secret=SECRET, host="192.0.2.1")


def test_ipv6() -> None:
    try:
        server = RendezvousServer(1, secret=SECRET, host="::1")
    except RendezvousError:
        pytest.skip("no IPv6 loopback here")
    with server, connect(server, 0, 1) as client:
        assert server.address.startswith("[::1]:")
        assert client.generation == 1


def test_stop_leaves_nothing() -> None:
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    server = RendezvousServer(2, secret=SECRET)
    with server:
        clients = connect_all(server, 2)
        for client in clients:
            client.close()
    server.stop()
    assert set(threading.enumerate()) <= threads  # what an earlier test has left may end meanwhile
    assert open_descriptors() <= descriptors
    with pytest.raises(RendezvousError, match="started or stopped before"):
        server.start()


def test_stop_without_start_frees_the_port() -> None:
    descriptors = open_descriptors()
    server = RendezvousServer(1, secret=SECRET)
    server.stop()
    server.stop()
    assert open_descriptors() == descriptors


def test_stop_wakes_waiting_clients() -> None:
    server = RendezvousServer(2, secret=SECRET)
    server.start()
    clients = connect_all(server, 2)

    def stop():
        clients[1].get("waiting")
        server.stop()

    def wait():
        clients[0].set("waiting", b"")
        clients[0].barrier()

    error, stopped = run_threads([wait, stop])
    assert stopped is None
    assert isinstance(error, RendezvousError)
    assert f"server at {server.address} is gone" in str(error)
    for client in clients:
        with pytest.raises(RendezvousError, match="is gone"):
            client.set("k", b"")
        with pytest.raises(RendezvousError, match="is gone"):
            client.check()
        client.close()


def test_serve_forever_stops_from_a_signal_handler() -> None:
    script = (
        "import signal, sys\n"
        "from gradsync.rendezvous.server import RendezvousServer\n"
        "server = RendezvousServer(1, secret=b's' * 16)\n"
        "signal.signal(signal.SIGTERM, lambda *_: server.stop())\n"
        "print(server.address, flush=True)\n"
        "server.serve_forever()\n"
        "print('stopped', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        with connect(address, 0, 1, secret=b"s" * 16):
            process.send_signal(signal.SIGTERM)
            assert process.stdout.read() == "stopped\n"
        assert process.wait(30) == 0


def test_garbage_connections_do_not_disturb_a_joining_run() -> None:
    rng = random.Random(3)
    begun, stop = threading.Event(), threading.Event()
    descriptors = open_descriptors()

    def disturb():
        host, port = server.address.split(":")
        kept: list[socket.socket] = []
        count = 0
        while not stop.is_set() and count < 3000:
            stream = socket.create_connection((host, int(port)), timeout=10)
            count += 1
            with contextlib.suppress(OSError):  # the server has closed it already: right so
                stream.sendall(rng.randbytes(rng.randint(0, 2000)))
            begun.set()
            kept.append(stream)
            if len(kept) > 100:
                kept.pop(rng.randrange(len(kept))).close()
        for stream in kept:
            stream.close()

    def work(client):
        for _ in range(50):
            client.barrier()
        return "done"

    def run():
        begun.wait(60)
        try:
            return [run_ranks(server, 4, work) for _ in range(3)]
        finally:
            stop.set()

    with RendezvousServer(4, secret=SECRET) as server:
        _, results = run_threads([disturb, run])
        assert results == [["done"] * 4] * 3
    assert open_descriptors() == descriptors


def test_oversized_frame_is_closed_at_once() -> None:
    with RendezvousServer(1, secret=SECRET) as server:
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port)), timeout=30) as stream:
            stream.sendall((2**31).to_bytes(4, "big"))
            assert stream.recv(1) == b""


def test_silent_strangers_are_closed_by_the_handshake_deadline(monkeypatch) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_SECONDS", 0.2)
    with RendezvousServer(1, secret=SECRET) as server:
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port)), timeout=30) as stream:
            assert stream.recv(1) == b""


def test_strangers_that_send_byte_by_byte_are_closed_by_it_too(monkeypatch) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_SECONDS", 0.2)
    with RendezvousServer(1, secret=SECRET) as server:
        host, port = server.address.split(":")
        hello = ClientHandshake(SECRET, bytes(NONCE_BYTES)).hello()
        with socket.create_connection((host, int(port)), timeout=30) as stream:
            sent = 0
            while sent < len(hello) - 1 and not select.select([stream], [], [], 0.05)[0]:
                stream.send(hello[sent : sent + 1])
                sent += 1
            assert sent < len(hello) - 1, "it was read to its last byte but one"


def test_too_many_authenticated_connections_are_refused() -> None:
    with RendezvousServer(1, secret=SECRET) as server:
        server._max_members = 1
        with connect(server, 0, 1) as client:
            with pytest.raises(RendezvousError, match="more than 1 authenticated connections"):
                connect(server, 0, 1)
            client.barrier()


def test_member_that_does_not_read_is_dropped(monkeypatch) -> None:
    monkeypatch.setattr(server_module, "MAX_OUTPUT_BYTES", 200_000)
    with RendezvousServer(2, secret=SECRET) as server:
        clients = connect_all(server, 2)
        try:
            clients[0].set("big", bytes(60_000))
            connection = clients[1]._connection
            connection._read = lambda: time.sleep(0.01)  # its reader reads no more
            deadline = time.monotonic() + 60
            with pytest.raises(RendezvousError):
                # No fixed number: the kernel's buffers take many requests before a busy server reads one.
                while time.monotonic() < deadline:
                    connection.post(FrameType.GET, "big", None)
            with pytest.raises(RankFailed, match="the peer has not read the last"):
                clients[0].barrier()
        finally:
            for client in clients:
                client.abandon()


@pytest.mark.parametrize("place", ["a message", "an inspection"])
def test_an_error_over_one_connection_ends_only_this_connection(place: str, monkeypatch, caplog) -> None:
    with RendezvousServer(2, secret=SECRET) as server:
        with contextlib.ExitStack() as closed:
            clients = connect_all(server, 2)
            for client in clients:
                closed.callback(client.abandon)
            if place == "a message":
                monkeypatch.setattr(server._core, "handle", failing_at("poison", server._core.handle))
                clients[1]._connection.post(FrameType.SET, "poison", b"")
            else:

                def fail(pid: int | None, _: object) -> None:
                    raise OverflowError(f"no process {pid}")

                monkeypatch.setattr(server_module, "inspect_peer", fail)
                clients[1]._connection.beat_at = float("inf")
                clients[1]._connection._interval_seconds = float("inf")
            with pytest.raises(RankFailed, match="rank 1"):
                clients[0].get("nothing", timeout_seconds=60)
        monkeypatch.undo()
        for client in connect_all(server, 2):  # the server goes on, with the next generation
            client.close()
    wait_until(lambda: "OverflowError" in caplog.text)


def failing_at(key: str, handle: Callable[[float, Event], list[Action]]) -> Callable[[float, Event], list[Action]]:
    def fail_or_handle(now: float, event: Event) -> list[Action]:
        if isinstance(event, Received) and event.message.fields[:1] == (key,):
            raise OverflowError(key)
        return handle(now, event)

    return fail_or_handle


@pytest.mark.parametrize("reads", [True, False])
def test_what_was_sent_before_a_connection_is_closed_arrives(reads: bool) -> None:
    """A peer that reads gets all; a peer that reads nothing is dropped after a second."""
    server = RendezvousServer(1, secret=SECRET)
    server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # what is accepted inherits it
    with server:
        client = connect(server, 0, 1)
        client.set("big", bytes(60_000))
        connection = client._connection
        got, may_read = [], threading.Event()

        def handle(message) -> None:
            got.append(len(message.fields[1]))

        def read() -> None:
            may_read.wait(JOIN_SECONDS)
            Connection._read(connection)

        connection._read, connection._handle = read, handle
        asked = 15
        for _ in range(asked):
            connection.post(FrameType.GET, "big", None)
        connection.post(FrameType.LEAVE, THE_WORLD, None, 0)
        if reads:
            time.sleep(0.1)  # the server closes meanwhile
            may_read.set()
        assert server.wait_until_empty(JOIN_SECONDS)
        may_read.set()
        connection._thread.join(JOIN_SECONDS)
        assert (got == [60_000] * asked) is reads
        client.abandon()


CHILD = """
import sys
from gradsync.rendezvous.client import RendezvousClient
client = RendezvousClient.connect(sys.argv[1], secret=bytes.fromhex(sys.argv[2]), rank=2, world_size=3)
client.barrier("start")
client.group([2], "alone").barrier()
client.get("never")
"""


def test_killed_process_fails_the_others_at_once() -> None:
    descriptors = open_descriptors()
    with RendezvousServer(3, secret=SECRET) as server:
        command = [sys.executable, "-c", CHILD, server.address, SECRET.hex()]
        with subprocess.Popen(command) as victim:
            started = threading.Barrier(3)
            killed_at = []

            def wait(rank: int):
                with connect(server, rank, 3) as client:
                    client.barrier("start")
                    started.wait(60)
                    try:
                        client.barrier("needs all")
                    except RankFailed as error:
                        return error, time.monotonic()

            def kill():
                started.wait(60)
                killed_at.append(time.monotonic())
                victim.kill()

            first, second, _ = run_threads([lambda: wait(0), lambda: wait(1), kill])
            for error, failed_at in (first, second):
                assert (error.rank, error.phase) == (2, "running")
                assert f"rank 2/3 (pid {victim.pid}) died" in str(error)
                assert failed_at - killed_at[0] < JOIN_SECONDS / 2
    assert open_descriptors() == descriptors


def test_who_has_reported_a_failure_knows_of_it_at_once() -> None:
    """What it closes then is closed because of a failure, which the others are to hear of first."""
    with RendezvousServer(2, secret=SECRET) as server:
        clients = connect_all(server, 2)
        try:
            clients[0].report_failure("the disk is full")
            assert clients[0].has_failed()
            with pytest.raises(RankFailed, match="the disk is full"):
                clients[1].get("nobody sets this")
        finally:
            for client in clients:
                client.close()


def test_killed_server_is_told() -> None:
    with server_process() as (process, address), connect(address, 0, 1) as client:
        process.kill()
        process.wait(30)
        with pytest.raises(RendezvousError, match="is gone"):
            client.get("k")
        with pytest.raises(RendezvousError, match="is gone"):
            client.check()


def test_killed_server_is_told_to_each_thread_that_waits() -> None:
    told: list[str] = []

    def wait_in_vain() -> None:
        with pytest.raises(RendezvousError, match="is gone") as caught:
            client.get("nobody sets this", timeout_seconds=JOIN_SECONDS)
        told.append(str(caught.value))

    with server_process() as (process, address), connect(address, 0, 1) as client:
        threads = [threading.Thread(target=wait_in_vain, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        client.set("all have asked", b"")
        process.kill()
        for thread in threads:
            thread.join(JOIN_SECONDS / 6)
        assert len(told) == 3


FORKING = """
import os
from gradsync.errors import CommunicatorClosed
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.server import RendezvousServer
with RendezvousServer(1, secret=b"s" * 16) as server:
    client = RendezvousClient.connect(server.address, secret=b"s" * 16, rank=0, world_size=1)
    child = os.fork()
    if child == 0:
        try:
            client.barrier()
        except CommunicatorClosed:
            client.abandon()
            client.close()
            server.stop()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    client.barrier()
    client.check()
    client.close()
"""


def test_child_of_a_fork_closes_without_harm() -> None:
    # Python warns about a fork beside threads; what follows it here is safe.
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKING], check=True, timeout=100)


def test_what_is_accepted_has_the_options_of_the_listener() -> None:
    """No delay, and a silent peer noticed by the kernel within seconds."""
    with RendezvousServer(1, secret=SECRET) as server, connect(server, 0, 1) as client:
        [accepted] = server._connections.values()
        for stream in (accepted.stream, client._connection._stream):
            assert stream.gettimeout() == 0.0
            assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            keepalive = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            assert [stream.getsockopt(socket.IPPROTO_TCP, option) for option in keepalive] == [2, 1, 3]
            assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000
