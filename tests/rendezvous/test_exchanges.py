"""Keys, exchanges, barriers and groups: what ranks share, whom a deadline names, and what a caller's mistake is."""

from __future__ import annotations

import os

import pytest

import gradsync as gs
from commands import wait_until
from gradsync.rendezvous.server import RendezvousServer
from rendezvous.clients import connect, failure_of, on_each, together, world, world_with_peer
from rendezvous.peer import SECRET, Kind, Status


@pytest.fixture
def pair():
    with world(2) as clients:
        yield clients


def test_ranks_share_keys_values_and_ids():
    def work(client):
        neighbour = (client.rank + 1) % 3
        client.set(f"key {client.rank}", bytes([client.rank]) * 1000)
        assert client.get(f"key {neighbour}", from_rank=neighbour) == bytes([neighbour]) * 1000
        if client.rank == 1:
            client.set("id", unique)
        assert client.get("id", from_rank=1) == unique
        assert client.exchange("names", b"rank %d" % client.rank) == [b"rank 0", b"rank 1", b"rank 2"]
        assert client.exchange("empty", b"") == [b""] * 3
        client.barrier("end")
        return client.generation, client.rank, client.world_size, client.world_ranks

    unique = os.urandom(128)
    with world(3) as clients:
        assert on_each(clients, work) == [(1, rank, 3, (0, 1, 2)) for rank in range(3)]


def test_an_exchange_gives_all_values_by_rank_however_long(pair):
    for length in (0, 1, 60 * 1024):
        values = [os.urandom(length) for _ in pair]
        for _ in range(2):  # a name can be used again
            assert (
                on_each(pair, lambda client, values=values: client.exchange("x", values[client.rank])) == [values] * 2
            )


def test_the_last_value_of_a_key_counts_until_it_is_deleted(pair):
    pair[0].set("key", b"0")
    pair[1].set("key", b"1")
    pair[0].set("key/below", b"2")
    pair[0].set("key2", b"3")
    assert pair[0].get("key") == b"1"
    pair[0].delete("key")
    pair[0].delete("key")  # one that is not set
    for name in ("key", "key/below"):
        with pytest.raises(gs.RendezvousTimeout):
            pair[1].get(name, timeout_seconds=0.01)
    assert pair[1].get("key2") == b"3"


def test_threads_of_one_rank_ask_side_by_side(pair):
    def ask(thread):
        for number in range(100):
            pair[0].set(f"{thread}/{number}", b"%d" % number)
            pair[0].check()
            assert pair[1].get(f"{thread}/{number}") == b"%d" % number

    assert together(*[lambda thread=thread: ask(thread) for thread in range(4)]) == [None] * 4


# -- Deadlines --------------------------------------------------------------------------------------------------------


def test_a_deadline_names_the_ranks_that_are_missing(pair):
    for call in (
        lambda: pair[0].barrier("epoch", timeout_seconds=0.05),
        lambda: pair[0].exchange("x", b"1", timeout_seconds=0),
        lambda: pair[0].get("key", from_rank=1, timeout_seconds=0.05),
        lambda: pair[0].group([1, 0], "by ranks of the world").barrier(timeout_seconds=0.05),
    ):
        with pytest.raises(gs.RendezvousTimeout) as raised:
            call()
        assert raised.value.missing_ranks == (1,)
        assert raised.value.missing == "rank 1 (running)"
    with pytest.raises(gs.RendezvousTimeout) as raised:
        pair[0].get("key", timeout_seconds=0.05)
    assert raised.value.missing_ranks == ()


def test_more_missing_ranks_than_an_error_lists_are_all_in_its_fields():
    with RendezvousServer(100, secret=SECRET) as server, pytest.raises(gs.RendezvousTimeout) as raised:
        connect(server, 7, 100, timeout_seconds=0.2)
    assert raised.value.missing_ranks == tuple(rank for rank in range(100) if rank != 7)
    assert "83 more" in raised.value.missing


def test_a_second_arrival_of_a_rank_takes_the_place_of_its_first():
    """Perhaps Ctrl-C has ended the first, of which the server does not know."""
    with world_with_peer(2) as ([client], peer):
        first, second = [peer.send(Kind.EXCHANGE, "x", None, value, None, 60_000) for value in (b"first", b"second")]
        ended = peer.answer()
        assert (ended.request, ended.status) == (first, Status.INVALID)
        assert client.exchange("x", b"0") == [b"0", b"second"]
        answer = peer.answer()
        assert (answer.request, answer.values) == (second, [[b"0", b"second"]])


# -- Mistakes ---------------------------------------------------------------------------------------------------------

MISTAKES = {
    "key": lambda client: client.set(1, b""),
    "long key": lambda client: client.set("k" * 2000, b""),
    "no UTF-8": lambda client: client.set("\ud800", b""),
    "text": lambda client: client.set("k", "text"),
    "long value": lambda client: client.set("k", bytes(61 * 1024)),
    "long value in exchange": lambda client: client.exchange("x", bytes(61 * 1024)),
    "negative timeout": lambda client: client.get("k", timeout_seconds=-1),
    "NaN": lambda client: client.barrier(timeout_seconds=float("nan")),
    "a group without this rank": lambda client: client.group([1], "g"),
    "a group twice": lambda client: client.group([0, 0], "g"),
    "a group of a stranger": lambda client: client.group([0, 2], "g"),
    "an empty group": lambda client: client.group([], "g"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_an_invalid_argument_and_changes_nothing(pair, what):
    with pytest.raises(gs.InvalidArgument):
        MISTAKES[what](pair[0])
    pair[0].set("k", b"still works")
    assert pair[1].get("k") == b"still works"


def test_all_values_of_an_exchange_have_one_limit():
    """Each rank receives all of them."""
    with world(16) as clients:
        errors = on_each(clients, lambda client: client.exchange("x", bytes(32 * 1024 + 1)))
        assert [type(error) for error in errors] == [gs.InvalidArgument] * 16
        assert on_each(clients, lambda client: sum(map(len, client.exchange("x", bytes(32 * 1024))))) == [2**19] * 16


def test_a_full_store_refuses_and_goes_on(pair):
    with pytest.raises(gs.RendezvousError) as raised:
        for number in range(10_000):
            pair[0].set(f"key {number}", bytes(60 * 1024))
    assert not isinstance(raised.value, gs.InvalidArgument)
    assert number > 100
    pair[1].set("key 0", b"a shorter one has room")
    pair[0].delete("key 1")
    pair[0].set("again", bytes(59 * 1024))


# -- Groups -----------------------------------------------------------------------------------------------------------


def test_members_are_numbered_as_listed_and_have_keys_of_their_own():
    def work(client):
        if client.rank == 1:
            return client.set("key", b"of the world")
        group = client.group([3, 0, 2], "three")
        inner = group.group([2, 0], "two") if client.rank != 0 else None
        assert group.exchange("x", b"%d" % client.rank) == [b"3", b"0", b"2"]
        if group.rank == 0:
            group.set("key", b"of three")
        assert group.get("key", from_rank=0) == b"of three"
        return group.rank, group.world_size, group.world_ranks, inner and (inner.rank, inner.world_ranks)

    with world(4) as clients:
        three = (3, (3, 0, 2))
        assert on_each(clients, work) == [(1, *three, None), None, (2, *three, (0, (2, 3))), (0, *three, (1, (2, 3)))]
        assert clients[0].get("key") == b"of the world"


def test_who_has_left_a_group_is_known_to_its_other_members_without_a_question():
    with world(3) as clients:
        groups = [clients[rank].group([2, 0], "pair") for rank in (0, 2)]
        groups[0].announce_left("comm", 3)
        wait_until(lambda: groups[1].left_ranks("comm") == {0: 3})
        assert groups[0].left_ranks("comm") == groups[1].left_ranks("another") == clients[1].left_ranks("comm") == {}


@pytest.mark.parametrize("how", ["a key", "a key it waits for", "a barrier", "an exchange", "a failure"])
def test_who_hears_of_what_a_rank_did_after_it_had_left_a_group_knows_that_it_left(how):
    with world(2) as clients:
        for number in range(50):
            clients[0].announce_left(f"comm {number}", 3)
            match how:
                case "a key":
                    clients[0].set(f"key {number}", b"")
                    clients[1].get(f"key {number}")
                case "a key it waits for":
                    together(lambda: clients[1].get(f"key {number}"), lambda: clients[0].set(f"key {number}", b""))
                case "a barrier":
                    on_each(clients, lambda client: client.barrier(f"b {number}"))
                case "an exchange":
                    on_each(clients, lambda client: client.exchange(f"x {number}", b"1"))
                case "a failure":
                    clients[0].report_failure("ValueError: 7")
                    failure_of(clients[1])
            assert clients[1].left_ranks(f"comm {number}") == {0: 3}
            if how == "a failure":
                break


@pytest.mark.parametrize("first", [0, 1])
def test_the_keys_of_a_group_go_once_all_its_members_have_left(first):
    """Else a run that makes many groups fills the store. Who has left the world has left its groups."""
    with world(3) as clients:
        group = clients[0].group([0, 1], "pair")
        group.set("key", b"value")
        leaving = [group.close, clients[1].close]
        for leave in (leaving[first], leaving[1 - first]):
            again = clients[0].group([0, 1], "pair")
            assert again.get("key") == b"value"
            leave()
        with pytest.raises(gs.RendezvousTimeout):
            again.get("key", timeout_seconds=0.01)


def test_an_exchange_with_a_root_gives_the_values_to_it_alone():
    """So that 16,384 ranks can offer what they have: only rank 0 reads it."""
    with world(3) as clients:
        got = on_each(clients, lambda client: client.exchange("x", b"%d" % client.rank, root=0))
        assert got == [[b"0", b"1", b"2"], [], []]
        clients[0].group([1, 0], "pair").exchange("y", b"0", root=0)
        assert clients[1].group([1, 0], "pair").exchange("y", b"1", root=0) == [b"1", b"0"]
        long = on_each(clients, lambda client: client.exchange("z", bytes(60 * 1024), root=2))
        assert long == [[], [], [bytes(60 * 1024)] * 3]


def test_a_root_names_who_is_missing_and_the_others_do_not_wait():
    with world(3) as clients:
        assert clients[2].exchange("x", b"2", root=0, timeout_seconds=0) == []
        with pytest.raises(gs.InvalidArgument):
            clients[1].exchange("x", b"1", root=1)
        with pytest.raises(gs.RendezvousTimeout) as raised:
            clients[0].exchange("x", b"0", root=0, timeout_seconds=0.05)
        assert raised.value.missing_ranks == (1,)
        clients[2].close()  # its value is there
        assert clients[1].exchange("x", b"1", root=0) == []
        assert clients[0].exchange("x", b"0", root=0) == [b"0", b"1", b"2"]


def test_the_values_of_exchanges_that_have_not_ended_are_stored_and_so_are_limited(pair):
    with pytest.raises(gs.RendezvousError) as raised:
        for number in range(10_000):
            pair[1].exchange(f"x{number}", bytes(60 * 1024), root=0)
    assert not isinstance(raised.value, gs.InvalidArgument)
    assert number > 1000
    assert len(pair[0].exchange("x0", b"", root=0)) == 2
    pair[1].set("key", bytes(59 * 1024))
