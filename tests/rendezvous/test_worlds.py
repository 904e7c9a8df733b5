"""Worlds by name on one server, which know nothing of each other; and the largest world, at the core itself."""

from __future__ import annotations

import gc
import itertools
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradsync as gs
from gradsync.rendezvous import wire
from gradsync.rendezvous.server import RendezvousServer
from gradsync.rendezvous.worlds import Worlds  # the core: sockets of 16,384 ranks are more than a machine of tests has
from rendezvous.clients import connect, failure_of, on_each, together
from rendezvous.peer import SECRET, Kind, Peer, Status, joining

ENDS = {
    "a failure": lambda client: client.report_failure("ValueError: 7"),
    "a death": lambda client: client.abandon(),
    "a departure": lambda client: client.close(),
}


@pytest.fixture
def server():
    with RendezvousServer(2, secret=SECRET) as server:
        yield server


def join(server, world, size):
    clients = together(*[lambda rank=rank: connect(server, rank, size, world=world) for rank in range(size)])
    for client in clients:
        if isinstance(client, BaseException):
            raise client
    return clients


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("names", [("", "evaluation"), ("evaluation", ""), ("one", "two")])
def test_worlds_on_one_server_see_no_keys_failures_or_deaths_of_each_other(server, names, how):
    one, other = [join(server, name, 2) for name in names]
    for number, clients in enumerate((one, other)):
        clients[0].set("key", b"of world %d" % number)
        with pytest.raises(gs.RendezvousTimeout):
            clients[0].barrier("one rank of each world", timeout_seconds=0.01)
    for number, clients in enumerate((one, other)):
        assert clients[1].get("key") == b"of world %d" % number
        assert on_each(clients, lambda client: client.exchange("x", b"%d" % client.rank)) == [[b"0", b"1"]] * 2
    ENDS[how](one[1])
    assert failure_of(one[0]).rank == 1
    on_each(one, lambda client: client.close())
    assert on_each(other, lambda client: client.barrier()) == [None, None]
    assert other[0].get("key") == b"of world 1"
    again = join(server, names[0], 2)
    assert {client.generation for client in again} == ({2} if names[0] == "" else {1})
    with pytest.raises(gs.RendezvousTimeout):
        again[0].get("key", timeout_seconds=0.01)
    assert on_each([*again, *other], lambda client: (client.barrier(), client.close())) == [(None, None)] * 4


def test_a_world_has_the_size_of_its_first_rank(server):
    with Peer.of_client(server.address) as peer:
        peer.send(Kind.JOIN, *joining(0, 3, world="three"))
        assert peer.receive().kind == Kind.REPLY  # it has joined, and waits
        with pytest.raises(gs.RendezvousError, match="world_size 3"):
            connect(server, 1, 2, world="three")
        others = together(*[lambda rank=rank: connect(server, rank, 3, world="three") for rank in (1, 2)])
        assert peer.answer().status == Status.OK
        on_each(others, lambda client: client.close())


def test_a_rank_joins_once_on_one_connection(server):
    with Peer.of_client(server.address) as peer:
        assert peer.join(world="one").status == Status.OK
        assert peer.join(world="two").status == Status.REFUSED
        assert peer.rest() == []


NUMBERS = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 2**31, 2**64 - 1])
TEXTS = st.sampled_from(["", "g", "another"])
VALUES = st.recursive(
    NUMBERS | TEXTS | st.sampled_from([None, True, 0.5, b""]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS | NUMBERS, inner, max_size=3),
    max_leaves=8,
)
LISTS, DICTS = st.none() | st.lists(VALUES, max_size=3), st.dictionaries(TEXTS | NUMBERS, VALUES, max_size=3)
RANKS, DATA = st.none() | NUMBERS, st.just(b"value")
#: By kind: fields of the right types, with anything in them.
MAD = {
    "JOIN": (TEXTS, NUMBERS, NUMBERS, RANKS, NUMBERS, TEXTS, TEXTS, NUMBERS, NUMBERS),
    "SET": (TEXTS, DATA),
    "GET": (TEXTS, RANKS, NUMBERS),
    "DELETE": (TEXTS,),
    "EXCHANGE": (TEXTS, LISTS, DATA, RANKS, NUMBERS),
    "LEAVE": (TEXTS, LISTS, NUMBERS),
    "FAIL": (TEXTS, RANKS),
    "BEAT": (DICTS,),
    "WAITING": (TEXTS, LISTS, NUMBERS, TEXTS, NUMBERS, LISTS, st.booleans()),
    "STATUS": (DICTS, TEXTS),
}
MESSAGES = st.sampled_from(sorted(MAD)).flatmap(lambda kind: st.tuples(st.just(kind), st.tuples(*MAD[kind])))
SANE = (
    ("EXCHANGE", ("g", None, b"", None, 1000)),
    ("GET", ("g", 2, 1000)),
    ("STATUS", ({"g": (2, ((1, 2, "barrier #1", False),))}, "here")),
    ("WAITING", ("g", None, 3, "barrier #3", 5000, None, True)),
)


@settings(max_examples=150)
@given(said=st.lists(MESSAGES, min_size=1, max_size=6))
def test_what_a_mad_member_says_is_an_error_over_its_own_messages_alone(said):
    """Never over another member's, and never later: the server could not tell whose connection to end."""
    worlds = Worlds(lambda *_: None, lambda _: None, lambda _: None, lambda _: "", size=3)
    for rank in range(3):
        worlds.received(0.0, rank, wire.Message(wire.Kind.JOIN, 1, list(joining(rank, 3))))
    for number, (kind, fields) in enumerate(said):
        try:
            worlds.received(1.0, 2, wire.Message(wire.Kind[kind], number, list(fields)))
        except Exception:
            worlds.lost(1.0, 2, "as the server says then")
            break
        for rank, (sane, its_fields) in itertools.product((0, 1), SANE):
            worlds.received(1.0, rank, wire.Message(wire.Kind[sane], 2, list(its_fields)))
        worlds.tick(1.0 + number)
    for seconds in range(2, 20, 3):
        worlds.tick(float(seconds))
        worlds.next_deadline()


@pytest.mark.slow
def test_the_largest_world_forms_and_gathers_in_little_memory_and_never_blocks_for_long():
    """16,384 ranks join, and offer 100 bytes each to rank 0."""

    def run():
        """Gives what the root was sent, and the longest time that one message took."""
        sent, slowest = [], 0.0

        def send(connection, kind, request, *fields):
            answered.add((connection, request))
            if connection == 0 and request == 2:
                sent.append(fields)

        answered = set()
        worlds = Worlds(send, lambda _: None, lambda _: None, lambda _: "", size=wire.MAX_RANKS)
        for number, fields in ((1, None), (2, ("offers", None, bytes(100), 0, 60_000))):
            for rank in range(wire.MAX_RANKS):
                kind = wire.Kind.JOIN if fields is None else wire.Kind.EXCHANGE
                message = wire.Message(kind, number, list(fields or joining(rank, wire.MAX_RANKS)))
                began = time.thread_time()
                worlds.received(float(number), rank, message)
                slowest = max(slowest, time.thread_time() - began)
            worlds.tick(number + 0.5)
        assert len(answered) == 2 * wire.MAX_RANKS
        return sent, slowest

    gc.collect()
    gc.disable()
    try:
        sent, slowest = run()
    finally:
        gc.enable()
    assert sum(len(values) for _, _, values in sent) == wire.MAX_RANKS
    assert slowest <= 0.050
    tracemalloc.start()
    try:
        run()
        assert tracemalloc.get_traced_memory()[1] <= 64 * 1024**2
    finally:
        tracemalloc.stop()


def test_ranks_that_leave_a_group_together_do_not_tell_each_other():
    """As at the end of a run: else n ranks would be sent n * n messages."""
    told, size = [], 64
    worlds = Worlds(lambda _, kind, *__: told.append(kind), lambda _: None, lambda _: None, lambda _: "", size=size)
    for rank in range(size):
        worlds.received(0.0, rank, wire.Message(wire.Kind.JOIN, 1, list(joining(rank, size))))
    for rank in range(size - 1):
        worlds.received(1.0, rank, wire.Message(wire.Kind.LEAVE, 0, ["comm", None, 7]))
    assert wire.Kind.LEFT not in told
    assert worlds.next_deadline() <= 1.0
    worlds.tick(1.0)
    assert told.count(wire.Kind.LEFT) == size - 1  # all to the one that has not left


@pytest.mark.slow
@pytest.mark.parametrize("what", ["joining", "barrier", "stuck"])
def test_the_largest_world_that_fails_does_not_block_the_server_for_long(what):
    """One rank is missing: all others reach their deadlines at the same time, or tell their last collectives."""
    size, answers = wire.MAX_RANKS, 0

    def send(connection, kind, *_):
        nonlocal answers
        answers += kind in (wire.Kind.REPLY, wire.Kind.FAILED)

    def say(rank, kind, *fields):
        worlds.received(0.0, rank, wire.Message(kind, 1, list(fields)))

    worlds = Worlds(send, lambda _: None, lambda _: None, lambda _: "", size=size)
    calls = [(number, 7, "barrier", number == 8) for number in range(1, 9)]
    for rank in range(size - (what == "joining")):
        say(rank, wire.Kind.JOIN, *joining(rank, size, seconds=9.0))
    for rank in range(size - 1):
        if what == "barrier":
            say(rank, wire.Kind.EXCHANGE, "name", None, b"", None, 9000)
        elif what == "stuck":
            say(rank, wire.Kind.WAITING, "", None, 8, "barrier", 9000, None, True)
            say(rank, wire.Kind.STATUS, {"": (8, calls)}, "here")
    answers, began = 0, time.thread_time()
    worlds.tick(10.0)
    assert time.thread_time() - began < 3.0  # n-squared, it was three times that and more
    assert answers >= size - 1
