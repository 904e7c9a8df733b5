"""Strangers, and members that have gone mad: limits hold, and the ranks of a run notice nothing. Many ranks at once."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradsync as gs
from commands import wait_until
from gradsync.rendezvous.server import RendezvousServer
from rendezvous.clients import connect, failure_of, join_all, on_each, thread_of, world
from rendezvous.peer import SECRET, FakeServer, Kind, Peer, Status, hello

STRANGERS_AT_ONCE = 64  # docs/security.md: and one for each rank


def dial(address):
    host, _, port = address.rpartition(":")
    stream = socket.create_connection((host, int(port)), timeout=60)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


def is_ended(stream):
    """Whether the other side has ended the connection by now."""
    stream.setblocking(False)
    try:
        return stream.recv(4096) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.slow  # five seconds
def test_strangers_that_are_silent_or_slow_are_ended_after_seconds():
    with world(2) as clients:
        address = clients[0].address
        with dial(address) as silent, dial(address) as after_hello, dial(address) as slow:
            after_hello.sendall(hello() + bytes(32))
            assert after_hello.recv(4096)  # the CHALLENGE
            letters = iter(hello() + bytes(32))
            while not is_ended(slow):
                with contextlib.suppress(OSError):
                    slow.send(bytes([next(letters)]))
                time.sleep(0.1)
            assert next(letters, None) is not None, "its whole HELLO was read"
            wait_until(lambda: is_ended(silent) and is_ended(after_hello))
        on_each(clients, lambda client: client.barrier())


def test_of_too_many_strangers_the_oldest_are_ended_and_none_costs_a_thread():
    with world(3) as clients, contextlib.ExitStack() as stack:
        threads = set(threading.enumerate())
        streams = [stack.enter_context(dial(clients[0].address)) for _ in range(3 + STRANGERS_AT_ONCE + 20)]
        for stream in streams[:20]:
            assert stream.recv(1) == b""
        assert not any(is_ended(stream) for stream in streams[20:])
        assert set(threading.enumerate()) <= threads
        on_each(clients, lambda client: client.barrier())


STRANGERS = (
    lambda rng: rng.randbytes(rng.randint(1, 2000)),
    lambda rng: b"",
    lambda rng: None,  # hangs up
    lambda rng: hello() + bytes(32),
    lambda rng: hello() + bytes(32) + rng.randbytes(100_000),
)


def test_ranks_that_join_work_and_leave_notice_no_strangers():
    """Some hundred strangers are there at any time: more than the server lets in, so that it drops ranks, too."""
    over, begun = threading.Event(), threading.Event()
    rng = random.Random(7)

    def disturb():
        kept = []
        while not over.is_set():
            for say in STRANGERS:
                stream = dial(server.address)
                text = say(rng)
                stream.setblocking(False)
                with contextlib.suppress(OSError):
                    stream.send(text or b"")
                stream.close() if text is None else kept.append(stream)
            while len(kept) > 100:
                begun.set()
                kept.pop(rng.randrange(len(kept))).close()
            time.sleep(0.001)
        for stream in kept:
            stream.close()

    def live(client):
        client.set(f"from {client.rank}", bytes([client.rank]))
        client.barrier()
        assert client.get(f"from {(client.rank + 1) % 8}") == bytes([(client.rank + 1) % 8])
        client.close()

    descriptors = os.listdir("/proc/self/fd")
    with RendezvousServer(8, secret=SECRET) as server, thread_of(disturb) as disturbing:
        assert begun.wait(60)
        for number in range(1, 6):
            clients = join_all(server, 8)
            assert {client.generation for client in clients} == {number}
            assert on_each(clients, live) == [None] * 8
        over.set()
        assert disturbing() is None
        assert server.wait_until_empty(60)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= len(descriptors))


def test_a_server_without_free_descriptors_goes_on_once_there_are_some(cli, secret_file):
    limited = ["sh", "-c", 'ulimit -n 40; exec "$@"', "sh", sys.executable, "-m", "gradsync"]
    server = cli.start_program(*limited, "serve", "--world-size", 1, "--secret-file", secret_file)
    address = server.stdout.readline().strip()
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(dial(address))
        with connect(address) as client:
            client.barrier()
    with connect(address) as client:
        client.barrier()
    server.terminate()
    result = server.result()
    assert result.code == 0
    assert "cannot accept connections" in result.err


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text(SECRET.hex())
    return path


def test_a_limit_of_open_files_that_is_too_low_is_raised_or_worth_a_warning(monkeypatch, caplog):
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    for ranks, soft, warns in ((100, 1024, False), (1000, 2320, False), (9000, 4096, True)):
        RendezvousServer(ranks, secret=SECRET).stop()
        assert limits[-1] == (soft, 4096)
        assert bool(caplog.records) is warns


# -- Members that have gone mad ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address():
    with RendezvousServer(1, secret=SECRET) as server:
        yield server.address
        with connect(server) as client:
            client.barrier()


def test_an_error_of_the_server_over_one_connection_ends_that_connection_alone(caplog):
    """Here over a list of ranks that holds a list. Another such message has once ended the server's thread."""
    with RendezvousServer(2, secret=SECRET) as server:
        with Peer.of_client(server.address) as peer, thread_of(lambda: connect(server, 0, 2)) as waiting:
            assert peer.join(1, 2).status == Status.OK
            peer.send(Kind.WAITING, "g", None, 1, "barrier #1", 5000, [[1]], False)
            assert peer.rest() == []
            with waiting() as client:
                assert failure_of(client).rank == 1
        on_each(join_all(server, 2), lambda client: (client.barrier(), client.close()))
    wait_until(lambda: "TypeError" in caplog.text)


def test_of_authenticated_connections_there_are_twice_the_ranks_and_sixteen(address):
    """A generation may leave while the next one joins."""
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(Peer.of_client(address)) for _ in range(19)]
        answers = [peer.join(world=f"world {number}") for number, peer in enumerate(peers)]
        assert [answer.status for answer in answers] == [Status.OK] * 18 + [Status.REFUSED]
        assert peers[-1].rest() == []
        peers[0].leave()
        with Peer.of_client(address) as another:
            assert another.join(world="another").status == Status.OK


@settings(max_examples=50)
@given(answer=st.binary(min_size=41, max_size=400))
def test_whatever_answers_a_client_s_hello_is_a_typed_error(answer):
    def serve(peer):
        peer.raw_frame()
        peer.stream.sendall(len(answer).to_bytes(4, "big") + answer)
        peer.stream.recv(1)

    with FakeServer(serve) as server, pytest.raises(gs.RendezvousError) as raised:
        connect(server.address)
    assert not isinstance(raised.value, gs.RendezvousTimeout)


# -- Many ranks -------------------------------------------------------------------------------------------------------


def test_many_clients_come_at_once():
    """So many that the values of an exchange take more than one message."""
    with world(130) as clients:
        values = [b"%4d" % rank * 1000 for rank in range(130)]
        assert on_each(clients, lambda client: client.exchange("x", values[client.rank])) == [values] * 130
        clients[17].abandon()
        errors = on_each(clients[:17] + clients[18:], lambda client: client.barrier())
        assert {(type(error), error.rank) for error in errors} == {(gs.RankFailed, 17)}
