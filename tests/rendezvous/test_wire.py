"""Frames: round trips, and the refusal of everything altered, replayed, reflected, truncated or oversized."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.rendezvous.frames import (
    MAX_CALL_BYTES,
    MAX_EVENT_BYTES,
    MAX_FAILURE_BYTES,
    MAX_GROUP_BYTES,
    MAX_NAME_BYTES,
    MAX_RANKS,
    MAX_REPORT_BYTES,
    MAX_STATUS_CALLS,
    MAX_STATUS_GROUPS,
    MAX_TEXT_BYTES,
    MAX_VALUE_BYTES,
    FieldError,
    FrameType,
    Message,
    clip_text,
    event_key,
)
from gradsync.rendezvous.roster import Failure
from gradsync.rendezvous.wire import MAX_FRAME_BYTES, FrameError, FrameReader, Session


def make_sessions() -> tuple[Session, Session]:
    up, down = b"u" * 32, b"d" * 32
    client = Session(send_key=up, receive_key=down, is_server=False)
    server = Session(send_key=down, receive_key=up, is_server=True)
    return client, server


def open_bytes(session: Session, data: bytes) -> Message | None:
    reader = FrameReader()
    reader.limit_bytes = MAX_FRAME_BYTES
    reader.feed(data)
    frame = reader.next_frame()
    return None if frame is None else session.open(frame)


keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=MAX_NAME_BYTES // 4)
timeouts = st.integers(0, 10**12)
members = st.none() | st.lists(st.integers(0, 1000), unique=True, max_size=20).map(sorted)
positions = st.integers(0, 2**63 - 1)
digests = st.integers(0, 2**64 - 1)
groups = st.text(st.characters(exclude_categories=["Cs"]), max_size=MAX_GROUP_BYTES // 4)
requests = st.one_of(
    st.tuples(st.just(FrameType.SET), keys, st.binary(max_size=2000)),
    st.tuples(st.just(FrameType.GET), keys, st.none() | st.integers(0, 99)),
    st.tuples(st.just(FrameType.EXCHANGE), keys, members, st.binary(max_size=2000)),
    st.tuples(st.just(FrameType.LEAVE), keys, members, positions),
    st.tuples(st.just(FrameType.LEFT_RANKS), keys, members),
)
texts = st.text(max_size=200).map(clip_text)
phases = st.sampled_from(["joining", "running", "left"])
progress = st.dictionaries(groups, positions, max_size=MAX_STATUS_GROUPS)
ranks_in_order = st.lists(st.integers(0, 1000), unique=True, max_size=20).map(sorted)
calls = st.tuples(positions, digests, st.text(max_size=50).map(clip_text), st.booleans()).map(list)
of_group = st.tuples(positions, st.lists(calls, max_size=8)).map(list)
statuses = st.dictionaries(groups, of_group, max_size=MAX_STATUS_GROUPS)
tidings = st.one_of(
    st.tuples(
        st.just(FrameType.JOIN),
        st.integers(0, 2**31 - 1),
        st.integers(0, 2**31 - 1),
        st.just("boot pid:[1]"),
        st.just("node7"),
        st.integers(0, 2**31 - 1),
    ),
    st.tuples(st.just(FrameType.HEARTBEAT), progress),
    st.tuples(st.just(FrameType.STUCK), groups, members, positions, texts, timeouts, members, st.booleans()),
    st.tuples(st.just(FrameType.STATUS), statuses, texts),
)
pushes = st.one_of(
    st.tuples(st.just(FrameType.PULSE)),
    st.tuples(st.just(FrameType.STATUS_REQUEST)),
    st.tuples(
        st.just(FrameType.FAILED), positions, st.integers(0, 2), st.integers(0, 99), phases, ranks_in_order, texts
    ),
)
answers = st.one_of(
    st.tuples(st.just(FrameType.REPLY), positions, st.none() | st.binary(max_size=2000)),
    st.tuples(st.just(FrameType.REPLY), positions, st.lists(positions, max_size=8)),
)


def pass_in_chunks(sender: Session, receiver: Session, messages: list[tuple], chunk_bytes: int) -> list[Message]:
    stream = b"".join(sender.seal(*message) for message in messages)
    reader = FrameReader()
    reader.limit_bytes = MAX_FRAME_BYTES
    opened = []
    for start in range(0, len(stream), chunk_bytes):
        reader.feed(stream[start : start + chunk_bytes])
        while (frame := reader.next_frame()) is not None:
            opened.append(receiver.open(frame))
    return opened


@pytest.mark.parametrize(("of_client", "kinds"), [(True, requests), (True, tidings), (False, pushes), (False, answers)])
@settings(max_examples=40)  # `make prove PART=fuzz` has many more
@given(data=st.data(), chunk_bytes=st.integers(1, 40))
def test_round_trip_in_any_chunks(of_client: bool, kinds: Any, data: st.DataObject, chunk_bytes: int) -> None:
    messages = data.draw(st.lists(kinds, max_size=5))
    client, server = make_sessions()
    sender, receiver = (client, server) if of_client else (server, client)
    opened = pass_in_chunks(sender, receiver, messages, chunk_bytes)
    assert [(m.type, *m.fields) for m in opened] == messages
    if kinds is requests:
        assert [m.sequence for m in opened] == list(range(2, 2 + len(messages)))


@pytest.mark.parametrize(
    "message",
    [
        (FrameType.SET, "key", b"value" * 10),
        (FrameType.EXCHANGE, "group", [0, 1], b"digest"),
        (FrameType.LEAVE, "group", [0, 1], 2**63 - 1),
    ],
)
def test_mutated_frames_are_refused(message: tuple) -> None:
    rng = random.Random(7)
    client, _ = make_sessions()
    sealed = client.seal(*message)
    for _ in range(5000):
        mutant = bytearray(sealed)
        for _ in range(rng.randint(1, 3)):
            mutant[rng.randrange(len(mutant))] ^= rng.randint(1, 255)
        if bytes(mutant) == sealed:
            continue
        # A length that grew only asks for more bytes; nothing may ever come out.
        with contextlib.suppress(FrameError):
            assert open_bytes(make_sessions()[1], bytes(mutant)) is None


def test_longest_report_and_verdict_fit() -> None:
    client, server = make_sessions()
    call = [2**63 - 1, 2**64 - 1, "c" * MAX_CALL_BYTES, True]
    calls = [call] * (MAX_STATUS_CALLS // MAX_STATUS_GROUPS)
    status = {f"{n:02}" + "g" * (MAX_GROUP_BYTES - 2): (2**63 - 1, calls) for n in range(MAX_STATUS_GROUPS)}
    assert open_bytes(server, client.seal(FrameType.STATUS, status, "x" * MAX_REPORT_BYTES)) is not None
    for missing in (0, 4096, 12 * 1024, MAX_RANKS):
        failure = Failure(0, "p" * MAX_NAME_BYTES, "é" * MAX_FAILURE_BYTES, missing=tuple(range(missing)))
        sent = failure.send(1, 2**63 - 1)
        message = open_bytes(client, server.seal(sent.type, *sent.fields))
        assert message is not None
        assert message.fields[4] == list(range(missing))
        assert len(message.fields[5]) > 6000


def test_every_truncation_yields_nothing() -> None:
    client, _ = make_sessions()
    sealed = client.seal(FrameType.SET, "key", b"value")
    for size in range(len(sealed)):
        assert open_bytes(make_sessions()[1], sealed[:size]) is None


def test_replayed_frame_is_refused() -> None:
    client, server = make_sessions()
    sealed = client.seal(FrameType.DELETE, "n")
    assert open_bytes(server, sealed) is not None
    with pytest.raises(FrameError, match=r"expected frame 3, got frame 2"):
        open_bytes(server, sealed)


def test_skipped_frame_is_refused() -> None:
    client, server = make_sessions()
    client.seal(FrameType.DELETE, "n")
    with pytest.raises(FrameError, match="expected frame 2, got frame 3"):
        open_bytes(server, client.seal(FrameType.DELETE, "n"))


def test_reflected_frame_is_refused() -> None:
    client, _ = make_sessions()
    with pytest.raises(FrameError, match="MAC"):
        open_bytes(client, client.seal(FrameType.LEAVE, "", None, 0))


@pytest.mark.parametrize("announced_bytes", [0, 40, 513 - 4, 2**16, 2**32 - 1])
def test_length_is_checked_before_anything_is_buffered(announced_bytes: int) -> None:
    reader = FrameReader()
    reader.feed(announced_bytes.to_bytes(4, "big"))
    with pytest.raises(FrameError, match="a frame needs"):
        reader.next_frame()


def test_largest_value_fits_beside_the_longest_key() -> None:
    client, server = make_sessions()
    message = open_bytes(server, client.seal(FrameType.SET, "k" * MAX_NAME_BYTES, b"\0" * MAX_VALUE_BYTES))
    assert message is not None
    assert len(message.fields[1]) == MAX_VALUE_BYTES


def test_longest_description_and_key_of_an_event_fit() -> None:
    client, server = make_sessions()
    group, position = "g" * MAX_GROUP_BYTES, 2**63 - 1
    key = event_key(group, position, MAX_RANKS - 1)
    assert open_bytes(server, client.seal(FrameType.SET, key, bytes(MAX_EVENT_BYTES)))


@pytest.mark.parametrize(
    ("frame_type", "fields"),
    [
        (FrameType.SET, ("key", "text")),
        (FrameType.SET, (1, b"")),
        (FrameType.SET, ("key", b"", True)),
        (FrameType.REPLY, (2, True)),
        (FrameType.SET, ("k" * (MAX_NAME_BYTES + 1), b"")),
        (FrameType.SET, ("é" * MAX_NAME_BYTES, b"")),
        (FrameType.SET, ("\ud800", b"")),
        (FrameType.SET, ("key", b"\0" * (MAX_VALUE_BYTES + 1))),
        (FrameType.SET, ("key",)),
        (FrameType.GET, ("key", -1)),
        (FrameType.EXCHANGE, ("", [1, 1], b"")),
        (FrameType.EXCHANGE, ("", [2, 1], b"")),
        (FrameType.EXCHANGE, ("", [-1], b"")),
        (FrameType.EXCHANGE, ("g", None, None)),
        (FrameType.REPLY, (2, 5)),
        (FrameType.REPLY, (2, [3, -1])),
        (FrameType.HEARTBEAT, ([],)),
        (FrameType.HEARTBEAT, ({"g": -1},)),
        (FrameType.HEARTBEAT, ({1: 1},)),
        (FrameType.HEARTBEAT, ({str(n): 1 for n in range(MAX_STATUS_GROUPS + 1)},)),
        (FrameType.JOIN, (0, 2, "m" * (MAX_NAME_BYTES + 1), "host", 1)),
        (FrameType.JOIN, (0, 2, "m", "host", -1)),
        (FrameType.JOIN, (0, 2, 0, "m", "host", 1, None)),
        (FrameType.STATUS, ({"world": 1}, "")),
        (FrameType.STATUS, ({}, "x" * (MAX_REPORT_BYTES + 1))),
        (FrameType.STATUS, ({"world": (1, [[1, 2, "barrier"]])}, "")),
        (FrameType.STATUS, ({"world": (1, [[1, 2, "barrier", 1]])}, "")),
        (FrameType.STATUS, ({"world": (1, "calls")}, "")),
        (FrameType.STATUS, ({"world": (1, [[1, 2, "x" * (MAX_CALL_BYTES + 1), True]])}, "")),
        (FrameType.STATUS, ({"world": (1, [[1, 2, "x", True]] * (MAX_STATUS_CALLS + 1))}, "")),
        (FrameType.STUCK, ("g", None, 1, "w" * (MAX_NAME_BYTES + 1), 0, None, True)),
        (FrameType.STUCK, ("g", None, 1, "all_reduce #1", 1.5, None, False)),
        (FrameType.STUCK, ("g", None, 1, "all_reduce #1", 0, [1, 0], False)),
        (FrameType.LEAVE, ("k" * (MAX_NAME_BYTES + 1), None, 0)),
        (FrameType.LEAVE, ("g", [1, 0], 0)),
        (FrameType.FAILED, (0, 3, 0, "", [], "")),
        (FrameType.FAILED, (0, 1, 0, "", None, "")),
        (FrameType.FAILED, (0, 1, 0, "", [], "x" * (MAX_FAILURE_BYTES + 1))),
    ],
)
def test_fields_outside_their_schema_are_refused(frame_type: FrameType, fields: tuple) -> None:
    client, server = make_sessions()
    session = server if frame_type.from_server else client
    before = session.send_sequence
    with pytest.raises(FieldError):
        session.seal(frame_type, *fields)
    assert session.send_sequence == before


def test_a_frame_that_is_never_complete_is_noticed() -> None:
    reader = FrameReader()
    reader.feed(b"\0\0\0\x50", 10.0)
    assert reader.next_frame() is None
    reader.feed(bytes(0x50) + b"\0\0\0\x50", 16.0)
    assert reader.next_frame() is not None
    assert reader.next_frame() is None  # another has begun
    reader.feed(b"some of it", 21.0)
    assert reader.next_frame() is None
    reader.feed(b"more of it", 21.1)
    with pytest.raises(FrameError, match="incomplete for 5 s: the data was probably altered on the way"):
        reader.next_frame()


def test_types_of_the_wrong_side_are_refused() -> None:
    client, server = make_sessions()
    sealed = client.seal(FrameType.REPLY, 2, None)
    with pytest.raises(FrameError, match="the peer may not send frame type 64"):
        open_bytes(server, sealed)


def test_repr_shows_no_fields() -> None:
    assert "secret" not in repr(Message(FrameType.SET, 1, ("k", b"secret")))


@given(st.text(max_size=50), st.integers(10, 60))
def test_clipped_text_fits(text: str, max_bytes: int) -> None:
    assert len(clip_text(text * 5, max_bytes).encode()) <= max_bytes
    assert clip_text("short") == "short"
    assert len(clip_text("x" * 10**5).encode()) <= MAX_TEXT_BYTES
