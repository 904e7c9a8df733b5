"""Ranks join: who is missing is named, a wrong join harms nobody, and one generation follows another."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

import gradsync as gs
from commands import wait_until
from gradsync.rendezvous.server import RendezvousServer
from rendezvous.clients import connect, join_all, on_each, thread_of, together
from rendezvous.peer import SECRET, FakeServer, Kind, Peer


@pytest.mark.ranks(3)
def test_a_join_timeout_names_the_missing_ranks(rank):
    if rank == 1:
        with pytest.raises(gs.RendezvousTimeout) as raised:
            gs.init_process_group("shm", timeout_seconds=0.5)
        assert raised.value.missing_ranks == (0, 2)
        assert raised.value.missing == "rank 0 (not joined), rank 2 (not joined)"


@pytest.mark.ranks(2)
def test_one_process_group_follows_another(rank):
    for number in range(1, 6):
        with gs.init_process_group("shm") as comm:
            assert comm.all_reduce(np.full(3, number)).tolist() == [2 * number] * 3


def test_ranks_that_wait_until_their_deadlines_name_those_that_never_came():
    with RendezvousServer(4, secret=SECRET) as server:
        first, second = (lambda r=r: connect(server, r, 4, timeout_seconds=1.0) for r in (0, 2))
        for error in together(first, second):
            assert type(error) is gs.RendezvousTimeout
            assert set(error.missing_ranks) >= {1, 3}
        clients = join_all(server, 4)  # who gave up may come again
        assert [client.generation for client in clients] == [1] * 4
        on_each(clients, lambda client: client.close())


@pytest.mark.parametrize(("rank", "size"), [(0, 3), (2, 2), (7, 2), (2**31, 2), (0, 0)])
def test_a_wrong_join_is_refused_and_harms_nobody(rank, size):
    with RendezvousServer(2, secret=SECRET) as server, thread_of(lambda: connect(server, 0, 2)) as waiting:
        with Peer.of_client(server.address) as peer:
            assert peer.join(rank, size).kind == Kind.REFUSED
            assert peer.rest() == []
        if 0 <= rank < size:
            with pytest.raises(gs.RendezvousError):
                connect(server, rank, size)
        else:
            with pytest.raises(gs.InvalidArgument):
                connect(server, rank, size)
        with connect(server, 1, 2), waiting() as first:
            assert first.generation == 1


def test_a_rank_joins_once():
    with RendezvousServer(2, secret=SECRET) as server, thread_of(lambda: connect(server, 0, 2)) as waiting:
        with Peer.of_client(server.address) as peer:
            peer.send(Kind.JOIN, 1, 2, "machine", "host", 0)
            peer.answer()
            waiting()
            with pytest.raises(gs.RendezvousError) as raised:
                connect(server, 1, 2)
            assert not isinstance(raised.value, gs.RendezvousTimeout)
            peer.leave()
        waiting().close()


def test_who_has_not_joined_is_not_answered():
    with RendezvousServer(2, secret=SECRET) as server:
        with Peer.of_client(server.address) as peer:
            peer.send(Kind.GET, "id", None)
            assert peer.rest() == []
        with Peer.of_client(server.address) as peer, Peer.of_client(server.address) as other:
            peer.send(Kind.JOIN, 0, 2, "machine", "host", 0)
            asked = peer.send(Kind.SET, "id", b"before all have joined")
            assert (peer.answer().kind, asked) == (Kind.REFUSED, 3)
            assert other.join(1, 2).kind == Kind.REPLY
            assert other.send(Kind.JOIN, 1, 2, "machine", "host", 0)  # once more on one connection
            assert other.answer().kind == Kind.REFUSED


def test_a_rank_whose_process_has_ended_is_not_waited_for():
    with RendezvousServer(3, secret=SECRET) as server, thread_of(lambda: connect(server, 0, 3)) as waiting:
        server.note_end(2, "ended with exit code 7")
        error = waiting()
        assert type(error) is gs.RankFailed
        assert (error.rank, error.phase, error.was_silent) == (2, "joining", False)
        assert "exit code 7" in str(error)


def test_the_end_of_a_process_that_has_joined_is_known_by_its_connection_alone():
    with RendezvousServer(2, secret=SECRET) as server:
        clients = join_all(server, 2)
        server.note_end(1, "ended with exit code 0")
        on_each(clients, lambda client: client.barrier())
        on_each(clients, lambda client: client.close())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rank_whose_process_is_stopped_before_it_joins_is_named(when):
    with (
        RendezvousServer(2, secret=SECRET) as server,
        subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process,
    ):
        try:
            server.note_start(1, process.pid)
            if when == "before":
                process.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            with thread_of(lambda: connect(server, 0, 2)) as waiting:
                process.send_signal(signal.SIGSTOP)
                error = waiting()
            assert type(error) is gs.RankFailed
            assert (error.rank, error.phase, error.was_silent) == (1, "joining", True)
        finally:
            process.kill()


def test_a_rank_that_dies_while_others_join_fails_them():
    with RendezvousServer(3, secret=SECRET) as server, Peer.of_client(server.address) as waiting:
        waiting.send(Kind.JOIN, 2, 3, "machine", "host", 0)
        with Peer.of_client(server.address) as peer:
            peer.send(Kind.JOIN, 1, 3, "machine", "host", 0)
            assert peer.receive().kind == Kind.PULSE  # it has joined
        assert waiting.answer().kind == Kind.FAILED
        with pytest.raises(gs.RankFailed) as raised:  # who comes later gets it, too
            connect(server, 0, 3)
        assert (raised.value.rank, raised.value.phase) == (1, "joining")


def test_ranks_that_come_early_for_the_next_generation_wait_for_the_end_of_this_one():
    with RendezvousServer(2, secret=SECRET) as server:
        first, second = join_all(server, 2)
        first.set("key", b"of the first generation")
        first.close()
        with thread_of(lambda: connect(server, 0, 2)) as early:
            second.close()
            with connect(server, 1, 2) as again, early() as other:
                assert (again.generation, other.generation) == (2, 2)
                with pytest.raises(gs.RendezvousTimeout):
                    again.get("key", timeout_seconds=0.01)


def test_after_a_failure_the_next_generation_forms():
    with RendezvousServer(2, secret=SECRET) as server:
        for number in (1, 2, 3):
            clients = join_all(server, 2)
            assert [client.generation for client in clients] == [number] * 2
            clients[1].report_failure("on purpose")
            with pytest.raises(gs.RankFailed):
                clients[0].barrier()
            on_each(clients, lambda client: client.close())


def test_who_is_missing_is_logged_until_all_have_joined(caplog):
    with (
        caplog.at_level(logging.WARNING, "gradsync"),
        RendezvousServer(3, secret=SECRET) as server,
        thread_of(lambda: connect(server, 1, 3)) as waiting,
    ):
        wait_until(lambda: "rank 0 (not joined), rank 2 (not joined)" in caplog.text)
        others = together(*[lambda rank=rank: connect(server, rank, 3) for rank in (0, 2)])
        on_each([*others, waiting()], lambda client: client.close())


def test_a_rank_that_is_interrupted_while_it_joins_reports_why():
    def serve(peer):
        peer.answer_hello()
        peer.answer()
        peer.send(Kind.PULSE)
        os.kill(os.getpid(), signal.SIGINT)
        said.extend(peer.rest())

    said = []
    with FakeServer(serve) as server, pytest.raises(KeyboardInterrupt):
        connect(server.address, 1, 3)
    [reported] = [message for message in said if message.kind == Kind.REPORT_FAILURE]
    assert "KeyboardInterrupt" in reported.fields[0]


@pytest.mark.parametrize(
    "address", ["nowhere", "127.0.0.1:0", "127.0.0.1:x", "::1:4000", ":80", "h:99999", "node0:４０"]
)
def test_a_malformed_address_is_an_invalid_argument(address):
    with pytest.raises(gs.InvalidArgument):
        connect(address)


def test_an_address_without_a_server_is_dialled_until_the_deadline():
    with socket.socket() as reserved:  # bound, not listening: it refuses
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        with pytest.raises(gs.RendezvousTimeout) as raised:
            connect(address, timeout_seconds=0.2)
        assert "refused" in raised.value.cause
        assert raised.value.missing_ranks == ()
        with thread_of(lambda: connect(address)) as waiting:
            reserved.listen()
            with RendezvousServer(1, secret=SECRET, listener=reserved), waiting() as client:
                assert client.generation == 1


def test_a_name_that_is_none_is_a_timeout_with_its_cause():
    for name in ("no.such.host.invalid:4000", "x" * 300 + ":4000"):
        with pytest.raises(gs.RendezvousTimeout) as raised:
            connect(name, timeout_seconds=0.2)
        assert raised.value.cause


def test_an_address_that_swallows_all_leaves_time_for_the_next(monkeypatch):
    """A name of two addresses: the first one's machine is down."""
    look_up = socket.getaddrinfo
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.2", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(3):  # once its backlog is full, what is sent to it is lost
            stream = stack.enter_context(socket.socket())
            stream.setblocking(False)
            stream.connect_ex(listener.getsockname())
        both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")]
        monkeypatch.setattr(
            socket, "getaddrinfo", lambda host, *a, **k: both if host in ("head", b"head") else look_up(host, *a, **k)
        )
        with RendezvousServer(1, secret=SECRET, port=port):
            connect(f"head:{port}", timeout_seconds=8.0).close()
