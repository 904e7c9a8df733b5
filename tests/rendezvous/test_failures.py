"""Failures of ranks and of the server: who hears what, for how long it stays, and that nothing is left."""

from __future__ import annotations

import os
import pickle
import socket
import threading

import pytest

import gradsync as gs
from commands import wait_until
from gradsync.rendezvous.server import RendezvousServer
from rendezvous.clients import connect, failure_of, join_all, on_each, thread_of, together, world, world_with_peer
from rendezvous.peer import PATIENCE_SECONDS, SECRET, FakeServer, Kind, Status, accept_join

DEATH = 0, 1, "running", [], "rank 1/2 died"


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


def test_a_failure_in_the_same_bytes_as_the_end_of_the_stream_is_the_one_that_counts():
    def serve(peer):
        accept_join(peer)
        asked = peer.answer().request
        failed = peer.seal(Kind.FAILED, *DEATH)
        peer.stream.sendall(failed + peer.seal(Kind.REPLY, Status.OK, True, b"late", request=asked))
        peer.stream.shutdown(socket.SHUT_WR)
        peer.rest()

    with FakeServer(serve) as server, connect(server.address) as client:
        for _ in range(2):
            with pytest.raises(gs.RankFailed) as raised:
                client.get("key")
            assert raised.value.rank == 1


def test_a_member_that_does_not_read_is_dropped():
    """A megabyte of answers waits for it at most."""
    with world_with_peer(2) as (clients, peer):
        clients[0].set("big", bytes(60_000))
        try:
            while True:
                peer.send(Kind.GET, "big", None, 60_000)
        except OSError:
            pass
        failure = failure_of(clients[0])
        assert (type(failure), failure.rank) == (gs.RankFailed, 1)


def test_a_server_that_does_not_read_delays_neither_a_deadline_nor_a_failure():
    fails = threading.Event()

    def serve(peer):
        accept_join(peer)
        fails.wait(PATIENCE_SECONDS)
        peer.send(Kind.FAILED, *DEATH)
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
    with world(4) as clients:
        waits = [lambda: clients[0].get("k", from_rank=1), clients[0].barrier, lambda: clients[2].get("k", from_rank=1)]
        *errors, _ = together(*waits, clients[1].close)
        for wait in waits:  # later, too
            with pytest.raises(gs.RankFailed) as raised:
                wait()
            errors.append(raised.value)
        assert {(type(error), error.rank, error.phase) for error in errors} == {(gs.RankFailed, 1, "left")}
        on_each([clients[0], clients[2]], lambda client: client.group([0, 2], "rest").barrier())
        clients[0].set("k", b"v")
        assert clients[2].get("k") == b"v"
        with thread_of(lambda: clients[0].get("absent")) as waiting:
            clients[2].close()
            clients[3].close()
            assert waiting().phase == "left"  # nobody is left who could set it


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
            peer.send(Kind.GET, "big", None, 60_000)
        peer.send(Kind.LEAVE, "", None, 0)
        assert [len(message.values[0]) for message in peer.rest()] == [60_000] * 15
        clients[0].check()


# -- The server -------------------------------------------------------------------------------------------------------


def test_all_ranks_hear_of_a_server_that_stops_and_it_leaves_nothing():
    threads, descriptors = set(threading.enumerate()), os.listdir("/proc/self/fd")
    RendezvousServer(2, secret=SECRET).stop()  # one that was never started
    server = RendezvousServer(2, secret=SECRET)
    server.start()
    clients = join_all(server, 2)
    with thread_of(lambda: clients[0].get("never")) as waiting:
        server.stop()
        errors = [waiting()]
    for client in clients:
        errors.append(failure_of(client))  # which waits for the news: check and set do not
        for call in calls_of(client):
            with pytest.raises(gs.RendezvousError) as raised:
                call()
            errors.append(raised.value)
        client.close()
    assert {type(error) for error in errors} == {gs.RendezvousError}
    server.stop()
    with pytest.raises(gs.RendezvousError):
        server.start()
    wait_until(lambda: set(threading.enumerate()) <= threads)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= len(descriptors))


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
