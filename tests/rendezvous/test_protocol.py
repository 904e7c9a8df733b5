"""The core with a virtual clock: joins, generations, deadlines, goodbyes, deaths."""

from __future__ import annotations

import pytest
from core_bench import SERVER, Bench

from gradsync.rendezvous.handshake import ServerHandshake
from gradsync.rendezvous.messages import DEATH, INVALID, PROTOCOL_VERSION, REFUSED, FrameType
from gradsync.rendezvous.wire import FrameReader


def test_generation_forms_when_all_have_joined() -> None:
    bench = Bench(2)
    first = bench.join(10, 1)
    assert bench.take(10) == [(FrameType.SEATED, first, *SERVER)]
    second = bench.join(11, 0)
    assert bench.take(10) == [(FrameType.REPLY, first, 1)]
    assert bench.take(11) == [(FrameType.SEATED, second, *SERVER), (FrameType.REPLY, second, 1)]


def test_join_deadline_names_the_rank_that_never_came_to_all() -> None:
    bench = Bench(3)
    first = bench.join(0, 0, timeout_ms=1000)
    bench.wait(0.1)
    second = bench.join(1, 1, timeout_ms=1000)
    bench.wait(5)
    # Rank 1's deadline comes after rank 0 gave up: it still names rank 2 only.
    assert bench.take(0)[1:] == [(FrameType.TIMED_OUT, first, (2,), "rank 2 (not joined)")]
    assert bench.take(1)[1:] == [(FrameType.TIMED_OUT, second, (2,), "rank 2 (not joined)")]
    assert bench.closed == [0, 1]
    bench.lose(0)
    bench.lose(1)
    bench.join_all(20)
    assert bench.core.next_deadline() is None


def test_when_the_host_waits_no_longer_all_hear_who_is_missing() -> None:
    bench = Bench(4, host=0)
    host = bench.join(0, 0, timeout_ms=1000)
    others = [bench.join(rank, rank, timeout_ms=timeout_ms) for rank, timeout_ms in ((1, 60_000), (2, 500))]
    bench.wait(0.6)
    assert bench.closed == [2]  # another one that gives up is no reason for anybody else to
    bench.wait(0.5)
    where = "rank 3 (not joined)"
    assert bench.take(0)[1:] == [(FrameType.TIMED_OUT, host, (3,), where)]
    assert bench.take(1)[1:] == [(FrameType.TIMED_OUT, others[0], (3,), where)]
    assert bench.closed == [2, 0, 1]
    for connection in range(3):
        bench.lose(connection)
    bench.join_all(20)
    assert bench.core.next_deadline() is None


def test_a_deadline_of_the_host_in_a_barrier_is_its_own() -> None:
    bench = Bench(3, host=0)
    bench.join_all()
    waits = [bench.send(rank, FrameType.BARRIER, "b", None, 1000 * (1 + rank)) for rank in range(2)]
    bench.wait(1.5)
    assert bench.take(0) == [(FrameType.TIMED_OUT, waits[0], (2,), "rank 2 (in 'running')")]
    assert bench.take(1) == []


def test_a_group_of_ranks_that_do_not_exist_is_not_forgotten() -> None:
    bench = Bench(2)
    bench.join_all()
    bench.send(0, FrameType.FORGET, "group", [0, 7])
    bench.send(0, FrameType.BYE)  # what it still had to do with is looked at
    counter = bench.send(1, FrameType.ADD, "count", 1)
    assert bench.take(1) == [(FrameType.REPLY, counter, 1)]


def test_slow_joiners_are_named_every_few_seconds() -> None:
    bench = Bench(3)
    bench.join(0, 0, timeout_ms=60_000)
    bench.wait(11)
    expected = "1 of 3 ranks have joined; waiting for rank 1 (not joined), rank 2 (not joined)"
    assert bench.notices == [expected, expected]


@pytest.mark.parametrize(
    ("version", "rank", "world_size", "texts"),
    [
        (PROTOCOL_VERSION + 1, 0, 2, (f"version {PROTOCOL_VERSION}", f"version {PROTOCOL_VERSION + 1}")),
        (PROTOCOL_VERSION, 0, 3, ("world_size 2", "with 3")),
        (PROTOCOL_VERSION, 0, 1, ("world_size 2", "with 1")),
        (PROTOCOL_VERSION, 2, 2, ("ranks 0 to 1", "rank 2")),
        (PROTOCOL_VERSION, 1, 2, ("rank 1/2 has joined already",)),
    ],
)
def test_wrong_joins_are_refused_and_harm_nobody(version, rank, world_size, texts) -> None:
    bench = Bench(2)
    first = bench.join(1, 1)
    bench.take(1)
    bad = bench.send(9, FrameType.JOIN, version, rank, world_size, 1000)
    kind, sequence, refusal, text = bench.take(9)[0]
    assert (kind, sequence, refusal) == (FrameType.REFUSED, bad, REFUSED)
    assert all(part in text for part in texts)
    assert bench.closed == [9]
    bench.lose(9)
    bench.join(0, 0)
    assert bench.take(1) == [(FrameType.REPLY, first, 1)]


def test_who_has_ended_is_not_waited_for() -> None:
    bench = Bench(3)
    bench.join(0, 0)
    bench.end(1)
    [seated, (kind, *failure, text)] = bench.take(0)
    assert (seated[0], kind, *failure) == (FrameType.SEATED, FrameType.FAILED, 0, DEATH, 1, "joining", ())
    assert text == "rank 1/3 ended with exit code 0 without joining: the others would wait in vain"
    bench.join(2, 2)  # too late for that generation, and there can be no other
    assert bench.take(2)[-1][0] is FrameType.FAILED
    bench.lose(0)
    bench.join(3, 0)
    assert bench.take(3)[-1][0] is FrameType.FAILED


def test_who_ends_after_its_generation_has_formed_harms_nobody() -> None:
    bench = Bench(2)
    bench.join_all()
    bench.send(1, FrameType.BYE)
    bench.end(1)
    bench.take(0)
    asked = bench.send(0, FrameType.ADD, "count", 1)
    assert bench.take(0) == [(FrameType.REPLY, asked, 1)]


def test_death_while_others_wait_to_join() -> None:
    bench = Bench(3)
    bench.join(0, 0)
    bench.join(1, 1)
    bench.take(0)
    bench.lose(1, "killed")
    [(kind, *failure, text)] = bench.take(0)
    assert (kind, *failure) == (FrameType.FAILED, 0, DEATH, 1, "joining", ())
    assert "rank 1/3 died" in text
    assert "killed" in text
    # The third rank belongs to the same, failed generation.
    bench.join(2, 2)
    assert bench.take(2)[0][0] is FrameType.FAILED
    # Once its connections are gone, the next one forms.
    bench.lose(0)
    bench.lose(2)
    for rank in range(3):
        last = bench.join(10 + rank, rank)
    assert bench.take(12)[-1] == (FrameType.REPLY, last, 1)


# What a rank of the first edition, version 5, sent: its HELLO, PROOF and JOIN, with nonces that are no more secret.
VERSION_5 = (
    "000000520100000000000000006772616473796e6301" + "63" * 32 + "00" * 32,
    "0000002903000000000000000194a172d3ae960516a020ff629fa6f3c1b0d126f76048a3cb8a26dea0e2f56b8e",
    "0000003010000000000000000294050002cdea60f57002df086c3e396d4a0b37f46340cfc65dc6a4dcfc0feaa053da327dc3e045",
)


def test_recorded_frames_of_the_version_before_are_refused_with_both_versions() -> None:
    reader, handshake = FrameReader(), ServerHandshake(b"s" * 32, "run", b"n" * 32)
    reader.feed(bytes.fromhex("".join(VERSION_5)))
    frames = [reader.next_frame() for _ in VERSION_5]
    _, session, join = handshake.receive(frames[0]), handshake.receive(frames[1]), frames[2]
    message = session.open(join)
    bench = Bench(2)
    bench.send(9, message.type, *message.fields)
    [(kind, _, refusal, text)] = bench.take(9)
    assert (kind, refusal, bench.closed) == (FrameType.REFUSED, REFUSED, [9])
    assert "the server speaks protocol version 6, rank 0 version 5; run the same version of gradsync" in text


def test_death_poisons_waiting_and_later_requests() -> None:
    bench = Bench(3)
    bench.join_all()
    bench.send(0, FrameType.BARRIER, "b", None, 10_000)
    bench.lose(2)
    for connection in (0, 1):
        [(kind, *failure, _)] = bench.take(connection)
        assert (kind, *failure) == (FrameType.FAILED, 0, DEATH, 2, "running", ())
    later = bench.send(1, FrameType.SET, "k", b"v")
    assert bench.take(1)[0][:4] == (FrameType.FAILED, later, DEATH, 2)
    bench.lose(0)  # a second death changes nothing
    assert bench.take(1) == []
    bench.wait(100)
    assert bench.inbox == {}


def test_reported_failure_reaches_all_but_the_reporter() -> None:
    bench = Bench(2)
    bench.join_all()
    sequence = bench.send(1, FrameType.REPORT_FAILURE, "ValueError: 7", None)
    assert bench.take(1) == [(FrameType.REPLY, sequence, None)]
    [(kind, *failure, text)] = bench.take(0)
    assert (kind, *failure) == (FrameType.FAILED, 0, DEATH, 1, "running", ())
    assert "ValueError: 7" in text


def test_what_the_reporter_waits_for_fails_with_its_own_failure() -> None:
    bench = Bench(3)
    bench.join_all()
    barrier = bench.send(1, FrameType.BARRIER, "b", None, 60_000)
    key = bench.send(1, FrameType.GET, "never", 60_000)
    report = bench.send(1, FrameType.REPORT_FAILURE, "ValueError: 7", None)
    replied, *failed = bench.take(1)
    assert replied == (FrameType.REPLY, report, None)
    assert [message[:4] for message in failed] == [(FrameType.FAILED, wait, DEATH, 1) for wait in (barrier, key)]
    assert all("ValueError: 7" in message[-1] for message in failed)
    assert bench.core.next_deadline() is None


@pytest.mark.parametrize(("culprit", "named"), [(2, 2), (3, 1), (None, 1)])
def test_reported_failure_names_the_culprit(culprit, named) -> None:
    bench = Bench(3)
    bench.join_all()
    bench.send(1, FrameType.REPORT_FAILURE, "in all_reduce", culprit)
    [(kind, *failure, text)] = bench.take(0)
    assert (kind, *failure) == (FrameType.FAILED, 0, DEATH, named, "running", ())
    assert "rank 1/3 failed in phase 'running': in all_reduce" in text


def test_goodbye_leads_to_the_next_generation() -> None:
    bench = Bench(2)
    bench.join_all()
    bench.send(0, FrameType.BYE)
    held = bench.join(10, 0)
    assert bench.take(10) == [(FrameType.SEATED, held, *SERVER)]  # rank 1 still lives in generation 1
    again = bench.join(11, 0)
    assert bench.take(11)[0][:2] == (FrameType.REFUSED, again)  # one held join per rank
    bench.send(1, FrameType.BYE)
    assert bench.take(10) == []
    other = bench.join(12, 1)
    assert bench.take(10) == [(FrameType.REPLY, held, 2)]
    assert bench.take(12)[-1] == (FrameType.REPLY, other, 2)


def test_held_joins_form_as_soon_as_the_generation_before_has_ended() -> None:
    bench = Bench(3)
    bench.join_all()
    for rank in (0, 1):
        bench.send(rank, FrameType.BYE)
        bench.join(10 + rank, rank)
    bench.lose(2)
    bench.inbox.clear()
    bench.join(12, 2)
    assert [bench.take(10 + rank)[-1][0::2] for rank in range(3)] == [(FrameType.REPLY, 2)] * 3


def test_keys_do_not_outlive_their_generation() -> None:
    bench = Bench(1)
    bench.join(0, 0)
    bench.send(0, FrameType.SET, "k", b"v")
    bench.send(0, FrameType.BYE)
    bench.join(1, 0)
    bench.take(1)
    missing = bench.send(1, FrameType.GET, "k", 500)
    bench.wait(1)
    assert bench.take(1) == [(FrameType.TIMED_OUT, missing, (), "")]


def test_get_waits_for_set_and_counters_are_text() -> None:
    bench = Bench(2)
    bench.join_all()
    get = bench.send(0, FrameType.GET, "n", 1000)
    add = bench.send(1, FrameType.ADD, "n", 5)
    assert bench.take(0) == [(FrameType.REPLY, get, b"5")]
    assert bench.take(1) == [(FrameType.REPLY, add, 5)]
    bench.send(1, FrameType.SET, "n", b"many")
    bench.take(1)
    bad = bench.send(1, FrameType.ADD, "n", 1)
    assert bench.take(1)[0][:3] == (FrameType.REFUSED, bad, INVALID)
    bench.send(1, FrameType.SET, "n", str(2**63 - 1).encode())
    bench.take(1)
    bench.send(1, FrameType.ADD, "n", 1)
    assert "64 bits" in bench.take(1)[0][3]
    assert [bench.send(1, FrameType.DELETE, "n") and bench.take(1)[0][2] for _ in range(2)] == [True, False]


def test_barrier_deadline_withdraws_the_waiter_and_later_ones_hold() -> None:
    bench = Bench(3)
    bench.join_all()
    first = bench.send(0, FrameType.BARRIER, "b", None, 1000)
    second = bench.send(1, FrameType.BARRIER, "b", None, 1001)
    bench.wait(2)
    where = "rank 2 (in 'running')"
    assert bench.take(0) == [(FrameType.TIMED_OUT, first, (2,), where)]
    assert bench.take(1) == [(FrameType.TIMED_OUT, second, (2,), where)]
    for _ in range(2):
        sent = [bench.send(rank, FrameType.BARRIER, "b", None, 1000) for rank in (2, 0, 1)]
        assert [bench.take(c) for c in (2, 0, 1)] == [[(FrameType.REPLY, s, None)] for s in sent]
    bench.wait(10)
    assert bench.inbox == {}


def test_cancelled_barrier_can_be_entered_again() -> None:
    bench = Bench(2)
    bench.join_all()
    waiting = bench.send(0, FrameType.BARRIER, "b", None, 60_000)
    bench.send(0, FrameType.CANCEL, waiting)
    bench.send(0, FrameType.CANCEL, waiting)
    assert bench.core.next_deadline() is None
    again = bench.send(0, FrameType.BARRIER, "b", None, 60_000)
    bench.send(1, FrameType.BARRIER, "b", None, 60_000)
    assert bench.take(0) == [(FrameType.REPLY, again, None)]


def test_barriers_of_different_ranks_are_different() -> None:
    bench = Bench(3)
    bench.join_all()
    pair = bench.send(0, FrameType.BARRIER, "b", [0, 1], 1000)
    bench.send(2, FrameType.BARRIER, "b", None, 1000)
    bench.send(1, FrameType.BARRIER, "b", [0, 1], 1000)
    assert bench.take(0) == [(FrameType.REPLY, pair, None)]
    assert bench.take(2) == []
    bad = bench.send(0, FrameType.BARRIER, "b", [1, 2], 1000)
    assert bench.take(0)[0][:3] == (FrameType.REFUSED, bad, INVALID)


def test_goodbye_fails_those_who_need_the_rank() -> None:
    bench = Bench(3)
    bench.join_all()
    barrier = bench.send(0, FrameType.BARRIER, "b", None, 60_000)
    unique = bench.send(1, FrameType.GET_ID, "g", 2, None, 60_000)
    bench.send(2, FrameType.BYE)
    assert bench.take(0)[0][:5] == (FrameType.FAILED, barrier, DEATH, 2, "left")
    assert bench.take(1)[0][:5] == (FrameType.FAILED, unique, DEATH, 2, "left")
    late = bench.send(1, FrameType.BARRIER, "b", None, 60_000)
    assert bench.take(1)[0][:5] == (FrameType.FAILED, late, DEATH, 2, "left")
    pair = bench.send(0, FrameType.BARRIER, "b", [0, 1], 60_000)
    bench.send(1, FrameType.BARRIER, "b", [0, 1], 60_000)
    assert bench.take(0) == [(FrameType.REPLY, pair, None)]
    # A read fails once nobody else remains.
    bench.take(1)
    get = bench.send(0, FrameType.GET, "k", 60_000)
    bench.send(1, FrameType.BYE)
    assert bench.take(0)[0][:4] == (FrameType.FAILED, get, DEATH, 1)


def test_unique_id_goes_to_members_only_and_once() -> None:
    bench = Bench(3)
    bench.join_all()
    value = bytes(range(128))
    get = bench.send(1, FrameType.GET_ID, "g", 0, [0, 1], 1000)
    outsider = bench.send(2, FrameType.GET_ID, "g", 0, [0, 1], 1000)
    assert bench.take(2)[0][:3] == (FrameType.REFUSED, outsider, INVALID)
    bench.send(2, FrameType.GET_ID, "g", 0, None, 1000)
    assert "has root 0 and ranks (0, 1)" in bench.take(2)[0][3]
    bench.send(1, FrameType.PUT_ID, "g", 0, [0, 1], value)
    assert "comes from its root" in bench.take(1)[0][3]
    bench.send(0, FrameType.PUT_ID, "g", 0, [0, 1], value)
    assert bench.take(1) == [(FrameType.REPLY, get, value)]
    bench.take(0)
    bench.send(0, FrameType.PUT_ID, "g", 0, [0, 1], value)
    assert "handed in before" in bench.take(0)[0][3]


def test_unique_id_deadline_names_the_root() -> None:
    bench = Bench(2)
    bench.join_all()
    get = bench.send(1, FrameType.GET_ID, "g", 0, None, 1000)
    bench.wait(2)
    assert bench.take(1) == [(FrameType.TIMED_OUT, get, (0,), "rank 0 (in 'running')")]


def test_messages_without_a_seat_end_the_connection() -> None:
    bench = Bench(2)
    bench.send(5, FrameType.SET, "k", b"v")
    assert bench.closed == [5]
    assert bench.inbox == {}


def test_requests_before_the_generation_has_formed_are_refused() -> None:
    bench = Bench(2)
    bench.join(0, 0)
    bench.take(0)
    bench.send(0, FrameType.SET, "k", b"v")
    assert bench.take(0)[0][0] is FrameType.REFUSED
