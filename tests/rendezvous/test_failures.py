"""Failures of ranks and of the server: who hears what, for how long it stays, and that nothing is left."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading

import pytest

import gradsync as gs
from commands import wait_until
from gradsync.rendezvous.server import RendezvousServer
from rendezvous.clients import connect, failure_of, join_all, on_each, thread_of, together, world, world_with_peer
from rendezvous.peer import PATIENCE_SECONDS, SECRET, FakeServer, Kind, accept_join


@pytest.fixture
def pair():
    with world(2) as clients:
        yield clients


def calls_of(client):
    return client.check, client.barrier, lambda: client.get("k"), lambda: client.set("k", b"")


# -- Ranks that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [None, 0])
def test_a_reported_failure_reaches_all_and_stays(pair, culprit):
    pair[1].report_failure("ValueError: bad batch\n" + "x" * 10_000, culprit=culprit)
    assert pair[1].has_failed()
    pair[1].report_failure("only the first cause counts")
    failure = failure_of(pair[0])
    assert type(failure) is gs.RankFailed
    assert (failure.rank, failure.phase, failure.was_silent) == (1 if culprit is None else 0, "running", False)
    assert "ValueError: bad batch" in str(failure)
    assert pickle.loads(pickle.dumps(failure)).rank == failure.rank
    pair[0].report_failure("too late")
    for client in pair:
        assert failure_of(client).rank == failure.rank
        for call in calls_of(client):
            with pytest.raises(gs.RankFailed) as raised:
                call()
            assert raised.value.rank == failure.rank


def test_a_reported_failure_ends_what_the_reporter_waits_for():
    with world_with_peer(2) as (clients, peer):
        waits = [peer.send(Kind.GET, "never", None), peer.send(Kind.EXCHANGE, "b", None, b"")]
        peer.send(Kind.REPORT_FAILURE, "ValueError", None)
        failed = peer.answer()
        assert (failed.kind, failed.fields[2]) == (Kind.FAILED, 1)  # of the world: it ends all waits
        later = peer.ask(Kind.GET, "k", None)
        assert (later.kind, later.fields[2]) == (Kind.FAILED, 1)
        assert len(waits) == 2
        assert failure_of(clients[0]).rank == 1


def test_a_failure_reaches_a_rank_that_calls_nothing(pair):
    pair[1].abandon()
    wait_until(pair[0].has_failed)
    with pytest.raises(gs.RankFailed):
        pair[0].check()


def test_a_lost_connection_fails_who_waits(pair):
    with thread_of(pair[0].barrier) as waiting:
        pair[1].abandon()
        error = waiting()
    assert type(error) is gs.RankFailed
    assert (error.rank, error.phase, error.was_silent) == (1, "running", False)


def test_a_failure_in_the_same_bytes_as_the_end_of_the_stream_is_the_one_that_counts():
    def serve(peer):
        accept_join(peer)
        asked = peer.answer().sequence
        failed = peer.seal(Kind.FAILED, 0, 0, 1, "running", [], "rank 1/2 died")
        peer.stream.sendall(failed + peer.seal(Kind.PULSE) + peer.seal(Kind.REPLY, asked, b"late"))
        peer.stream.shutdown(socket.SHUT_WR)
        peer.rest()

    with FakeServer(serve) as server, connect(server.address) as client:
        for _ in range(2):
            with pytest.raises(gs.RankFailed) as raised:
                client.get("key")
            assert raised.value.rank == 1


def test_a_group_s_failure_is_the_world_s():
    with world(3) as clients:
        clients[0].group([2, 0], "pair").report_failure("no room")
        assert [failure_of(client).rank for client in clients[1:]] == [0, 0]


def test_a_member_that_does_not_read_is_dropped():
    """A megabyte of answers waits for it at most."""
    with world_with_peer(2) as (clients, peer):
        clients[0].set("big", bytes(60_000))
        try:
            while True:
                peer.send(Kind.GET, "big", None)
        except OSError:
            pass
        failure = failure_of(clients[0])
        assert (type(failure), failure.rank) == (gs.RankFailed, 1)


def test_a_server_that_does_not_read_delays_neither_a_deadline_nor_a_failure():
    fails = threading.Event()

    def serve(peer):
        accept_join(peer)
        fails.wait(PATIENCE_SECONDS)
        peer.send(Kind.FAILED, 0, 0, 1, "running", [], "rank 1/2 died")
        peer.rest()

    with FakeServer(serve) as server, connect(server.address) as client:
        fill = [lambda: client.set("key", bytes(60_000))] * 100  # which is more than the buffers of a connection hold
        with thread_of(lambda: together(*fill)) as filling:
            with pytest.raises(gs.RendezvousTimeout):
                client.get("key", timeout_seconds=0.01)
            fails.set()
            assert {type(error) for error in filling()} == {gs.RankFailed}


# -- Ranks that leave -------------------------------------------------------------------------------------------------


def test_who_has_left_fails_only_those_who_need_it():
    with world(3) as clients:
        clients[1].close()
        clients[1].close()
        for wait in (clients[0].barrier, lambda: clients[2].get("k", from_rank=1)):
            with pytest.raises(gs.RankFailed) as raised:
                wait()
            assert (raised.value.rank, raised.value.phase) == (1, "left")
        for client in (clients[0], clients[2]):
            client.check()
        on_each([clients[0], clients[2]], lambda client: client.group([0, 2], "rest").barrier())
        clients[0].set("k", b"v")
        assert clients[2].get("k") == b"v"
        clients[2].close()
        with pytest.raises(gs.RankFailed) as raised:  # nobody is left who could set it
            clients[0].get("absent")
        assert raised.value.phase == "left"


def test_who_waits_for_a_rank_that_leaves_is_woken(pair):
    waits = [lambda: pair[0].get("k", from_rank=1), pair[0].barrier, lambda: pair[0].get("absent")]
    *errors, _ = together(*waits, pair[1].close)
    assert [(type(error), error.rank, error.phase) for error in errors] == [(gs.RankFailed, 1, "left")] * 3


def test_a_client_that_is_closed_says_so(pair):
    waits = [lambda: pair[0].get("never"), pair[0].group([0], "alone").group([0], "more").check]
    woken, _, _ = together(*waits, pair[0].close)
    pair[1].abandon()
    assert type(woken) is gs.CommunicatorClosed
    for client in pair:
        for call in calls_of(client):
            with pytest.raises(gs.CommunicatorClosed):
                call()
        client.report_failure("nobody hears this")
        client.announce_left("comm", 1)
        client.close()
        client.abandon()


def test_what_was_sent_before_a_rank_left_is_answered():
    with world_with_peer(2) as (clients, peer):
        clients[0].set("big", bytes(60_000))
        for _ in range(15):
            peer.send(Kind.GET, "big", None)
        peer.send(Kind.LEAVE, "", None, 0)
        assert [len(message.fields[1]) for message in peer.rest()] == [60_000] * 15
        clients[0].check()


def test_what_comes_after_a_rank_has_left_is_not_read():
    with world_with_peer(2) as (clients, peer):
        peer.stream.sendall(peer.seal(Kind.LEAVE, "", None, 0) + peer.seal(Kind.SET, "key", b""))
        assert peer.rest() == []
        with pytest.raises(gs.RankFailed) as raised:
            clients[0].get("key")
        assert raised.value.phase == "left"


# -- The server -------------------------------------------------------------------------------------------------------


def test_all_ranks_hear_of_a_server_that_stops_and_it_leaves_nothing():
    threads, descriptors = set(threading.enumerate()), os.listdir("/proc/self/fd")
    server = RendezvousServer(2, secret=SECRET)
    server.start()
    clients = join_all(server, 2)
    with thread_of(lambda: clients[0].get("never")) as waiting:
        server.stop()
        assert type(waiting()) is gs.RendezvousError
    for client in clients:
        for call in calls_of(client):
            with pytest.raises(gs.RendezvousError) as raised:
                call()
            assert type(raised.value) is gs.RendezvousError
        client.close()
    server.stop()
    with pytest.raises(gs.RendezvousError):
        server.start()
    wait_until(lambda: set(threading.enumerate()) <= threads)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= len(descriptors))


def test_a_server_that_was_never_started_frees_its_port():
    descriptors = os.listdir("/proc/self/fd")
    server = RendezvousServer(1, secret=SECRET)
    server.stop()
    server.stop()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= len(descriptors))
    with RendezvousServer(1, secret=SECRET, port=int(server.address.rpartition(":")[2])) as again:
        assert again.address == server.address


def test_each_thread_that_waits_hears_of_a_killed_server(serve):
    process, address = serve(1)
    with connect(address) as client:
        waits = [lambda name=name: client.get(name) for name in "abc"]

        def kill():
            client.set("the others ask now or then", b"")
            process.kill()

        *errors, _ = together(*waits, kill)
        assert [type(error) for error in errors] == [gs.RendezvousError] * 3
        with pytest.raises(gs.RendezvousError):
            client.check()


def test_serve_ends_at_a_signal_and_tells_its_ranks(serve):
    process, address = serve(1)
    with connect(address) as client:
        process.send_signal(signal.SIGTERM)
        result = process.result()
        assert (result.code, result.err) == (0, "")
        assert type(failure_of(client)) is gs.RendezvousError


@pytest.mark.parametrize(
    "arguments", [{"port": -1}, {"port": 65536}, {"world_size": 0}, {"world_size": 2.0}, {"host": ""}]
)
def test_a_server_with_wrong_arguments_is_not_made(arguments):
    with pytest.raises(gs.InvalidArgument):
        RendezvousServer(**{"world_size": 1, "secret": SECRET} | arguments)


def test_an_address_that_cannot_be_bound_is_a_rendezvous_error():
    with RendezvousServer(1, secret=SECRET) as first:
        assert first.address.startswith("127.0.0.1:")  # where nobody else comes
        for where in (
            {"port": int(first.address.rpartition(":")[2])},
            {"host": "192.0.2.1"},
            {"host": "no.such.host.invalid"},
        ):
            with pytest.raises(gs.RendezvousError):
                RendezvousServer(1, secret=SECRET, **where)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_a_server_may_listen_at_an_ipv6_address():
    with RendezvousServer(1, secret=SECRET, host="::1") as server, connect(server) as client:
        assert server.address.startswith("[::1]:")
        client.barrier()
