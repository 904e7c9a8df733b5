"""The client's calls over loopback, with threads as ranks."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time

import pytest
from rendezvous_ranks import JOIN_SECONDS, SECRET, connect, connect_all, run_ranks, run_threads

from gradsync.errors import (
    AuthenticationError,
    CommunicatorClosed,
    InvalidArgument,
    RankFailed,
    RendezvousError,
    RendezvousTimeout,
)
from gradsync.rendezvous import connection as connection_module
from gradsync.rendezvous.server import RendezvousServer


def wait_for_failure(client) -> BaseException:
    """Calls check until it raises; the news is on its way."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            client.check()
        except Exception as error:
            return error
    raise AssertionError("check never raised")


def test_keys_and_exchanges() -> None:
    value = os.urandom(128)

    def work(client):
        client.set(f"key {client.rank}", bytes([client.rank]) * 1000)
        got = client.get(f"key {(client.rank + 1) % 3}", from_rank=(client.rank + 1) % 3)
        if client.rank == 1:
            client.set("id", value)
        unique = client.get("id", from_rank=1)
        values = client.exchange("names", f"rank {client.rank}".encode())
        backwards = client.group([2, 0, 1], "backwards").exchange("names", b"%d" % client.rank)
        client.barrier("end")
        return got, unique == value, values, backwards, client.generation

    with RendezvousServer(3, secret=SECRET) as server:
        results = run_ranks(server, 3, work)
    told = [b"rank 0", b"rank 1", b"rank 2"], [b"2", b"0", b"1"]
    assert results == [(bytes([(r + 1) % 3]) * 1000, True, *told, 1) for r in range(3)]


def test_the_last_value_counts_until_the_key_is_deleted(pair) -> None:
    pair[0].set("key", b"0")
    pair[1].set("key", b"1")
    assert pair[0].get("key") == b"1"
    pair[0].delete("key")
    with pytest.raises(RendezvousTimeout):
        pair[0].get("key", timeout_seconds=0.05)


def test_get_from_a_rank_names_it_and_ends_when_it_has_left(pair) -> None:
    with pytest.raises(RendezvousTimeout, match=r"missing: rank 1 \(running\)") as caught:
        pair[0].get("k", from_rank=1, timeout_seconds=0.05)
    assert caught.value.missing_ranks == (1,)
    waiting, _ = run_threads([lambda: pair[0].get("k", from_rank=1), pair[1].close])
    assert isinstance(waiting, RankFailed)
    assert (waiting.rank, waiting.phase) == (1, "left")


def test_who_has_left_a_communicator_is_told_with_its_position(pair) -> None:
    pair[1].announce_left("comm", 57)
    pair[1].set("announced", b"")
    pair[0].get("announced")
    assert pair[0].left_ranks("comm") == {1: 57}
    assert pair[0].left_ranks("another") == {}


def test_eight_ranks_times_a_thousand_barriers() -> None:
    def work(client):
        return [client.barrier(timeout_seconds=60) for _ in range(1000)]

    with RendezvousServer(8, secret=SECRET) as server:
        assert run_ranks(server, 8, work) == [[None] * 1000] * 8


def test_callers_mistakes_are_told_and_change_nothing(pair) -> None:
    client = pair[0]
    calls = [
        lambda: client.set(1, b""),
        lambda: client.set("k", "text"),
        lambda: client.set("k", bytes(61 * 1024)),
        lambda: client.set("k" * 2000, b""),
        lambda: client.exchange("x", bytes(61 * 1024)),
        lambda: client.get("k", timeout_seconds=-1),
        lambda: client.get("k", timeout_seconds=float("nan")),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument, match=r"rank 0/2|timeout_seconds"):
            call()
    client.set("k", b"still works")
    assert pair[1].get("k") == b"still works"


def test_get_deadline_names_key_and_deadline(pair) -> None:
    with pytest.raises(RendezvousTimeout, match=r"rank 0/2: get 'absent' reached its deadline of 0.05 s"):
        pair[0].get("absent", timeout_seconds=0.05)
    with pytest.raises(RendezvousTimeout):
        pair[0].get("absent", timeout_seconds=0)


def test_barrier_deadline_names_missing_ranks_and_where_they_are(pair) -> None:
    with pytest.raises(RendezvousTimeout, match=r"missing: rank 1 \(running\)") as caught:
        pair[0].barrier("epoch", timeout_seconds=0.05)
    assert caught.value.missing_ranks == (1,)
    assert run_threads([lambda c=c: [c.barrier("epoch") for _ in range(3)] for c in pair]) == [[None] * 3] * 2


def test_reported_failure_reaches_the_others_and_sticks(pair) -> None:
    pair[1].report_failure("ValueError: bad batch\n" + "x" * 10_000)
    failure = wait_for_failure(pair[0])
    assert isinstance(failure, RankFailed)
    assert (failure.rank, failure.phase) == (1, "running")
    assert "ValueError: bad batch" in str(failure)
    for call in (pair[0].check, pair[0].barrier, lambda: pair[0].get("k")):
        with pytest.raises(RankFailed, match=rf"rank 1/2 \(pid {os.getpid()}\) failed"):
            call()
    assert pickle.loads(pickle.dumps(failure)).rank == 1
    pair[0].report_failure("too late")  # the first cause stays, and this does not raise


def test_reported_failure_ends_what_the_reporter_itself_waits_for(pair) -> None:
    waiting = [lambda: pair[1].barrier("needs all"), lambda: pair[1].get("never")]

    def report():
        deadline = time.monotonic() + 30
        while len(pair[1]._connection._pending) < len(waiting):  # what goes next, goes after these
            assert time.monotonic() < deadline
        pair[1].report_failure("ValueError: bad batch", culprit=0)

    *errors, reported = run_threads([*waiting, report])
    assert reported is None
    assert [(type(error), error.rank) for error in errors] == [(RankFailed, 0)] * 2
    assert all("failed: ValueError: bad batch" in str(error) for error in errors)
    assert pair[1].has_failed()
    with pytest.raises(RankFailed, match="bad batch"):
        pair[1].get("anything")


def test_lost_connection_fails_a_waiting_barrier(pair) -> None:
    def die():
        pair[1].set("ready", b"")
        pair[1].abandon()

    waiting, _ = run_threads([lambda: (pair[0].get("ready") and None) or pair[0].barrier(), die])
    assert isinstance(waiting, RankFailed)
    assert (waiting.rank, waiting.phase) == (1, "running")


def test_goodbye_does_not_poison_but_fails_who_needs_the_rank(pair) -> None:
    pair[1].close()
    pair[1].close()
    pair[0].check()
    pair[0].set("k", b"v")
    for wait in (pair[0].barrier, lambda: pair[0].get("absent")):
        with pytest.raises(RankFailed, match="rank 1/2 left") as caught:
            wait()
        assert caught.value.rank == 1
    pair[0].check()
    assert pair[0].get("k") == b"v"


def test_closed_client_says_so(pair) -> None:
    pair[0].close()
    pair[1].abandon()
    for client in pair:
        for call in (client.check, client.barrier, lambda c=client: c.set("k", b"")):
            with pytest.raises(CommunicatorClosed):
                call()


def test_close_wakes_a_thread_that_waits(pair) -> None:
    entered = threading.Event()

    def wait():
        entered.set()
        pair[0].get("never")

    def close():
        entered.wait(30)
        pair[0].close()

    waiting, closing = run_threads([wait, close])
    assert isinstance(waiting, CommunicatorClosed)
    assert closing is None


def test_check_from_another_thread_is_harmless(pair) -> None:
    def check_often():
        for _ in range(2000):
            pair[0].check()

    results = run_threads([check_often, *(lambda c=c: [c.barrier() for _ in range(200)][-1] for c in pair)])
    assert results == [None, None, None]


def test_many_threads_ask_at_once(pair) -> None:
    results = run_threads([lambda t=t: [pair[0].set(f"{t}/{n}", b"") for n in range(200)] and None for t in range(3)])
    assert results == [None] * 3
    assert all(pair[1].get(f"{t}/{n}", timeout_seconds=0) == b"" for t in range(3) for n in (0, 199))


def test_generations_follow_each_other() -> None:
    def work(rank: int):
        seen = []
        for _ in range(5):
            with connect(server, rank, 2) as client:
                client.set(f"{rank}", b"%d" % client.generation)
                seen.append((client.generation, client.get(f"{1 - rank}")))
                client.barrier()
        return seen

    with RendezvousServer(2, secret=SECRET) as server:
        expected = [(n, b"%d" % n) for n in range(1, 6)]
        assert run_threads([lambda: work(0), lambda: work(1)]) == [expected, expected]


def test_join_deadline_names_the_missing() -> None:
    with RendezvousServer(4, secret=SECRET) as server:
        results = run_threads([lambda r=r: connect(server, r, 4, timeout_seconds=3.0) for r in (0, 2)])
    for error in results:
        assert isinstance(error, RendezvousTimeout)
        assert error.missing_ranks == (1, 3)
        assert "rank 1 (not joined), rank 3 (not joined)" in str(error)


def test_unreachable_address_ends_at_the_deadline() -> None:
    with socket.socket() as reserved:  # bound, not listening: refuses
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(RendezvousTimeout, match=rf"{address} within 0\.[12]\d* s; last cause: .*refused"):
            connect(address, 0, 2, timeout_seconds=0.2)
    assert time.monotonic() - start < JOIN_SECONDS / 2


def test_client_waits_for_a_server_that_starts_later() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"

    def serve():
        listener.listen()
        with RendezvousServer(1, secret=SECRET, listener=listener) as server:
            joined.wait(60)
        return server.address

    def join():
        try:
            with connect(address, 0, 1) as client:
                return client.generation
        finally:
            joined.set()

    joined = threading.Event()
    assert run_threads([join, serve]) == [1, address]


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:0", "127.0.0.1:x", "::1:4000", ":80", "h:99999", 7])
def test_malformed_addresses(address) -> None:
    with pytest.raises(InvalidArgument, match="address needs"):
        connect(address, 0, 1)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_ranks_out_of_range(rank, world_size) -> None:
    with pytest.raises(InvalidArgument, match="needs a rank"):
        connect("127.0.0.1:9", rank, world_size)


def test_wrong_secret() -> None:
    with RendezvousServer(1, secret=SECRET) as server:
        with pytest.raises(AuthenticationError, match="secret"):
            connect(server, 0, 1, secret=b"another secret, as long")
        with connect(server, 0, 1) as client:
            assert client.generation == 1


def test_wrong_world_size_and_duplicate_rank() -> None:
    with RendezvousServer(2, secret=SECRET) as server:
        with pytest.raises(RendezvousError, match="world_size 2, rank 0 joined with world_size 3"):
            connect(server, 0, 3)
        clients = connect_all(server, 2)
        with pytest.raises(RendezvousError, match="rank 1/2 has joined already"):
            connect(server, 1, 2)
        assert run_threads([c.barrier for c in clients]) == [None, None]
        for client in clients:
            client.close()


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 200, b""])
def test_another_service_on_the_port(greeting: bytes, monkeypatch) -> None:
    monkeypatch.setattr(connection_module, "_FLOOD_SECONDS", 0.1)

    def serve():
        listener.settimeout(0.2)
        while not done.is_set():
            try:
                stream, _ = listener.accept()
            except TimeoutError:
                continue
            with stream:
                stream.sendall(greeting)

    def join():
        try:
            connect(f"127.0.0.1:{port}", 0, 1)
        finally:
            done.set()

    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        error, _ = run_threads([join, serve])
    assert isinstance(error, RendezvousError)
    assert "another service or run holds this port" in str(error)


def test_repr_and_messages_hold_no_secret(pair) -> None:
    value = b"capability" * 12 + b"12345678"
    pair[0].set("id", value)
    for text in (repr(pair[0]), repr(vars(pair[0])), repr(vars(pair[0]._connection))):
        assert SECRET.decode() not in text
        assert "capability" not in text
