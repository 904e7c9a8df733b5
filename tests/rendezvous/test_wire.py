"""Frames: what is no frame of this connection ends it, and is never read. Streams in parts: tests/simulation."""

from __future__ import annotations

import contextlib
import os
import socket
import time

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradsync as gs
from gradsync.rendezvous.server import RendezvousServer
from rendezvous.clients import connect, failure_of, join_all, on_each, thread_of
from rendezvous.peer import LONGEST_FRAME, SECRET, FakeServer, Kind, Peer, Status, accept_join, joining

MOST = 2**63 - 1


@pytest.fixture(scope="module")
def address():
    """Of a server of one rank, which must serve to the end."""
    with RendezvousServer(1, secret=SECRET) as server:
        yield server.address
        with connect(server) as client:
            client.barrier()


@contextlib.contextmanager
def member(address):
    with Peer.of_client(address) as peer:
        assert peer.join().status == Status.OK
        yield peer


# -- What is no frame of this connection ------------------------------------------------------------------------------


def altered(data, at, by=1):
    return data[:at] + bytes([data[at] ^ by]) + data[at + 1 :]


def sealed_by_another(address):
    with Peer.of_client(address) as other:
        other.seal(Kind.JOIN)
        return other.seal(Kind.SET, "key", b"value")


ALTERED = {
    "another sequence": lambda peer, _: peer.seal(Kind.SET, "skipped", b"") and peer.seal(Kind.SET, "key", b""),
    "of another connection": lambda _, address: sealed_by_another(address),
    "a kind of the server": lambda peer, _: peer.seal(Kind.REPLY, Status.OK, True),
    "a kind of the handshake": lambda peer, _: peer.seal(Kind.HELLO),
    "a kind that is unknown": lambda peer, _: peer.seal(200, "key", b""),
    "a body that is no msgpack": lambda peer, _: peer.seal(Kind.SET, body=b"\xc1"),
    "a body with more behind it": lambda peer, _: peer.seal(Kind.DELETE, body=msgpack.packb([1, "key"]) + b"\0"),
    "a body that is no array": lambda peer, _: peer.seal(Kind.DELETE, body=msgpack.packb({1: "key"})),
    "an empty body": lambda peer, _: peer.seal(Kind.DELETE, body=b""),
    "a body of many levels": lambda peer, _: peer.seal(Kind.DELETE, body=b"\x91" * 5000 + b"\xc0"),
    "text that is no UTF-8": lambda peer, _: peer.seal(Kind.DELETE, body=b"\x92\x01\xa2\xff\xfe"),
    "no request number": lambda peer, _: peer.seal(Kind.DELETE, body=msgpack.packb([])),
    **{
        f"{number!r} for a request number": lambda peer, _, number=number: peer.seal(Kind.SET, "k", b"", request=number)
        for number in (-1, 2**63, None, "1", True, 1.0)
    },
    "too long": lambda *_: (LONGEST_FRAME - 3).to_bytes(4, "big"),
    "too short": lambda *_: (40).to_bytes(4, "big") + bytes(40),
    "empty": lambda *_: bytes(4),
}


@pytest.mark.parametrize("what", ALTERED)
def test_what_is_no_frame_of_this_connection_ends_it(address, what):
    with member(address) as peer:
        peer.stream.sendall(ALTERED[what](peer, address))
        assert peer.rest() == []


@settings(max_examples=150)
@given(at=st.integers(0, 10**6), by=st.integers(0, 255), size=st.integers(0, 300))
def test_an_altered_frame_or_a_part_of_one_is_never_read(address, at, by, size):
    with member(address) as peer:
        sealed = peer.seal(Kind.SET, "key", os.urandom(size))
        at %= len(sealed)
        peer.stream.sendall(altered(sealed, at, by) if by else sealed[:at])
        peer.stream.shutdown(socket.SHUT_WR)  # where the length has grown, more would have to come
        assert peer.rest() == []


@pytest.mark.parametrize("what", ["replayed", "reflected"])
def test_a_frame_counts_once_and_for_one_direction(address, what):
    with member(address) as peer:
        sealed = peer.seal(Kind.SET, "a", b"1", request=2)
        peer.stream.sendall(sealed)
        answer = peer.raw_frame()
        peer.stream.sendall(sealed if what == "replayed" else answer)
        while peer.stream.recv(4096):
            pass


@pytest.mark.slow
def test_a_frame_may_take_its_time(address):
    """A slow link, or a process that was paused. That the frame is whole, its MAC says."""
    with member(address) as peer:
        sealed = peer.seal(Kind.SET, "key", bytes(50_000), request=2)
        for part in (sealed[:100], sealed[100:200], sealed[200:]):
            peer.stream.sendall(part)
            time.sleep(6.0)
        assert peer.answer().status == Status.OK


# -- Fields -----------------------------------------------------------------------------------------------------------

WAIT_MS = 60_000
TEXT, DATA, NUMBER, RANK, RANKS = "text", b"data", "a number", "a rank, or None", "ranks, or None"
#: What is none of them, as far as the server looks at a message as a whole.
WRONG = {
    TEXT: [1, b"key", None, ["key"], True],
    DATA: [None, "text", 1],
    NUMBER: [None, "3", 0.5, True],
    RANK: ["0", 0.5, True, [0]],
    RANKS: ["all", 1, {}, True],
    bool: [None, 0, "no"],
    dict: [[], None, "status"],
}
CALL = [1, 2, "barrier", True]
#: By kind: fields as a rank sends them, and what each of them is.
FIELDS = {
    Kind.JOIN: list(zip(joining(), (TEXT, NUMBER, NUMBER, RANK, NUMBER, TEXT, TEXT, NUMBER, NUMBER), strict=True)),
    Kind.SET: [("key", TEXT), (b"value", DATA)],
    Kind.GET: [("key", TEXT), (None, RANK), (WAIT_MS, NUMBER)],
    Kind.DELETE: [("key", TEXT)],
    Kind.EXCHANGE: [("name", TEXT), (None, RANKS), (b"", DATA), (None, RANK), (WAIT_MS, NUMBER)],
    Kind.FAIL: [("reason", TEXT), (None, RANK)],
    Kind.LEAVE: [("g", TEXT), (None, RANKS), (0, NUMBER)],
    Kind.BEAT: [({"g": 3}, dict)],
    Kind.WAITING: [
        *(("g", TEXT), (None, RANKS), (1, NUMBER), ("all_reduce #1", TEXT)),
        *((5000, NUMBER), (None, RANKS), (False, bool)),
    ],
    Kind.STATUS: [({"g": [3, [CALL]]}, dict), ("report", TEXT)],
}


@pytest.mark.parametrize("kind", FIELDS)
def test_a_field_of_a_wrong_type_ends_its_connection_alone(address, kind):
    good = [value for value, _ in FIELDS[kind]]
    wrong = [[*good[:at], each, *good[at + 1 :]] for at, (_, what) in enumerate(FIELDS[kind]) for each in WRONG[what]]
    for fields in (*wrong, good[:-1], [*good, None]):
        with Peer.of_client(address) as peer:
            if kind != Kind.JOIN:
                peer.join()
            peer.send(kind, *fields)
            assert peer.rest() == [], fields


@pytest.mark.parametrize("kind", FIELDS)
def test_the_same_fields_of_the_right_types_are_read(address, kind):
    with Peer.of_client(address) as peer:
        if kind != Kind.JOIN:
            peer.join()
        peer.send(kind, *[good for good, _ in FIELDS[kind]])
        last = peer.send(Kind.SET, "a connection that has ended answers no more", b"")
        while peer.answer().request not in (0, last):
            pass


#: Of the right types, but never sent by a client of ours.
ODD = {
    "a pid that is none of Linux": (Kind.JOIN, *joining(pid=2**31)),  # the server's thread has once ended of it
    "a pid below 0": (Kind.JOIN, *joining(pid=-1)),
    "collectives that are no numbers": (Kind.BEAT, {"g": "3"}),
    "groups that are no names": (Kind.BEAT, {1: 3}),
    "a number for a status": (Kind.STATUS, {"g": 1}, ""),
    "a status without calls": (Kind.STATUS, {"g": [1]}, ""),
    "a status with a text": (Kind.STATUS, {"g": ["1", []]}, ""),
    "numbers for calls": (Kind.STATUS, {"g": [1, 2]}, ""),
    "text for calls": (Kind.STATUS, {"g": [1, "call"]}, ""),
    "a call without its end": (Kind.STATUS, {"g": [1, [CALL[:3]]]}, ""),
    "a call with a text as its number": (Kind.STATUS, {"g": [1, [["1", *CALL[1:]]]]}, ""),
    "a call with a number as its text": (Kind.STATUS, {"g": [1, [[1, 2, 3, True]]]}, ""),
}


@pytest.mark.parametrize("what", ODD)
def test_what_is_odd_inside_a_field_ends_its_connection_alone(what):
    """Also when the server would have used it later, for a report on a collective that does not end."""
    kind, *fields = ODD[what]
    with RendezvousServer(2, secret=SECRET) as server, Peer.of_client(server.address) as peer:
        with thread_of(lambda: connect(server, 0, 2)) as waiting:
            if kind != Kind.JOIN:
                assert peer.join(1, 2).status == Status.OK
            peer.send(kind, *fields)
            assert peer.rest() == []
            with connect(server, 1, 2) if kind == Kind.JOIN else contextlib.nullcontext(), waiting() as client:
                if kind == Kind.JOIN:
                    client.check()
                else:
                    assert failure_of(client).rank == 1
        assert on_each(join_all(server, 2), lambda client: (client.barrier(), client.close())) == [(None, None)] * 2


def wrong(kind, *fields):
    return lambda peer, asked: peer.seal(kind, *fields, request=asked)


TO_A_CLIENT = {
    "garbage": lambda *_: b"\0" * 100,
    "altered": lambda peer, asked: altered(peer.seal(Kind.REPLY, Status.OK, True, b"value", request=asked), 20),
    "replayed": lambda peer, _: 2 * peer.seal(Kind.LEFT, "g", 1, 0),
    "the end": lambda *_: b"",
    "nothing": wrong(Kind.REPLY),
    "parts that are none": wrong(Kind.REPLY, Status.OK, False, 3),
    "none for ranks": wrong(Kind.FAILED, 1, 0, "", None, ""),
    "too few of a failure": wrong(Kind.FAILED, 1, 0, ""),
    "too few of a departure": wrong(Kind.LEFT, "g"),
    "a kind of clients": wrong(Kind.SET, "key", b""),
}


@pytest.mark.parametrize("what", TO_A_CLIENT)
def test_a_client_ends_a_connection_with_what_no_server_says(what):
    def serve(peer):
        accept_join(peer)
        peer.stream.sendall(TO_A_CLIENT[what](peer, peer.answer().request))
        if what == "the end":
            peer.stream.shutdown(socket.SHUT_WR)
        peer.rest()

    with FakeServer(serve) as server, connect(server.address) as client:
        for _ in range(2):
            with pytest.raises(gs.RendezvousError) as raised:
                client.get("key")
            assert not isinstance(raised.value, gs.RendezvousTimeout)


def test_the_longest_of_all_fits(address):
    """The largest value beside the longest key, and the longest status: more is refused, this is not."""
    with member(address) as peer:
        assert peer.ask(Kind.SET, "k" * 1024, bytes(60 * 1024)).status == Status.OK
        assert peer.ask(Kind.GET, "k" * 1024, None, WAIT_MS).values == [bytes(60 * 1024)]
        calls = [[MOST, 2**64 - 1, "c" * 200, True]] * 8
        peer.send(Kind.STATUS, {f"{n:02}" + "g" * 958: [MOST, calls] for n in range(16)}, "x" * 16 * 1024)
        peer.leave()
