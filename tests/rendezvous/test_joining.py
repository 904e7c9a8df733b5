"""Ranks join: who is missing is named, a wrong join harms nobody, and one generation follows another."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys

import pytest

import gradsync as gs
from commands import wait_until
from gradsync.rendezvous.server import RendezvousServer
from rendezvous.clients import connect, on_each, thread_of, together
from rendezvous.peer import SECRET, FakeServer, Kind, Peer, Status, joining


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (0, 3), (2, 2), (2**31, 2), (0, 0)])
def test_a_wrong_join_is_refused_and_harms_nobody(rank, size):
    with RendezvousServer(2, secret=SECRET) as server, Peer.of_client(server.address) as first:
        first.send(Kind.JOIN, *joining(0, 2))
        assert first.receive().kind == Kind.REPLY  # it has joined, and waits
        with Peer.of_client(server.address) as peer:
            assert peer.join(rank, size).status == Status.REFUSED
            assert peer.rest() == []
        with pytest.raises(gs.RendezvousError if 0 <= rank < size else gs.InvalidArgument) as raised:
            connect(server, rank, size)
        assert not isinstance(raised.value, gs.RendezvousTimeout)
        with connect(server, 1, 2) as client:
            assert client.generation == 1


def test_a_rank_whose_process_has_ended_is_not_waited_for():
    with RendezvousServer(3, secret=SECRET) as server, thread_of(lambda: connect(server, 0, 3)) as waiting:
        server.note_end(2, "ended with exit code 7")
        error = waiting()
        assert type(error) is gs.RankFailed
        assert (error.rank, error.phase, error.was_silent) == (2, "joining", False)
        assert "exit code 7" in str(error)


def test_a_rank_whose_process_is_stopped_before_it_joins_is_told_as_such():
    with (
        RendezvousServer(3, secret=SECRET) as server,
        subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process,
    ):
        try:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            server.note_start(2, process.pid)
            with pytest.raises(gs.RendezvousTimeout) as raised:
                connect(server, 0, 3, timeout_seconds=0.2)
        finally:
            process.kill()
    assert raised.value.missing == (
        f"rank 1 (not joined), rank 2 (not joined; its process {process.pid} is stopped: SIGSTOP?)"
    )


@pytest.mark.slow  # five seconds
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
        peer.reply(peer.answer(), [], is_last=False)
        os.kill(os.getpid(), signal.SIGINT)
        said.extend(peer.rest())

    said = []
    with FakeServer(serve) as server, pytest.raises(KeyboardInterrupt):
        connect(server.address, 1, 3)
    [reported] = [message for message in said if message.kind == Kind.FAIL]
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
