"""The core with a virtual clock: joins, generations, cancelled waits, goodbyes, deaths."""

from __future__ import annotations

import pytest
from core_bench import Bench

from gradsync.rendezvous.frames import (
    DEATH,
    INVALID,
    REFUSED,
    FrameType,
)


def joined(sequence: int, generation: int) -> tuple:
    return (FrameType.REPLY, sequence, (generation,))


def test_generation_forms_when_all_have_joined() -> None:
    bench = Bench(2)
    first = bench.join(10, 1)
    assert bench.take(10) == [(FrameType.PULSE,)]
    second = bench.join(11, 0)
    assert bench.take(10) == [joined(first, 1)]
    assert bench.take(11) == [(FrameType.PULSE,), joined(second, 1)]


def test_who_waits_no_longer_to_join_is_told_the_rank_that_never_came() -> None:
    bench = Bench(3)
    first, second = bench.join(0, 0), bench.join(1, 1)
    bench.cancel(0, first)
    bench.cancel(1, second)
    # Rank 1's deadline comes after rank 0 stopped waiting: it still names rank 2 only.
    assert bench.take(0)[1:] == [(FrameType.TIMED_OUT, first, (2,), "rank 2 (not joined)")]
    assert bench.take(1)[1:] == [(FrameType.TIMED_OUT, second, (2,), "rank 2 (not joined)")]
    assert bench.closed == [0, 1]
    bench.lose(0)
    bench.lose(1)
    bench.join_all(20)
    assert bench.core.next_deadline() is None


def test_when_the_host_waits_no_longer_all_hear_who_is_missing() -> None:
    bench = Bench(4, host=0)
    host = bench.join(0, 0)
    others = [bench.join(rank, rank) for rank in (1, 2)]
    bench.cancel(2, others[1])
    assert bench.closed == [2]  # another one that stops waiting is no reason for anybody else to
    bench.cancel(0, host)
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
    waits = [bench.send(rank, FrameType.EXCHANGE, "b", None, b"") for rank in range(2)]
    bench.cancel(0, waits[0])
    assert bench.take(0) == [(FrameType.TIMED_OUT, waits[0], (2,), "rank 2 (running)")]
    assert bench.take(1) == []


def test_who_has_left_a_group_is_told_with_its_position_until_all_have() -> None:
    bench = Bench(3)
    bench.join_all()
    bench.send(2, FrameType.LEAVE, "group", [0, 2], 57)
    asked = bench.send(0, FrameType.LEFT_RANKS, "group", [0, 2])
    assert bench.take(0) == [(FrameType.REPLY, asked, [2, 57])]
    other = bench.send(1, FrameType.LEFT_RANKS, "another", None)
    assert bench.take(1) == [(FrameType.REPLY, other, [])]
    bench.send(0, FrameType.SET, "group/key", b"value")
    bench.send(1, FrameType.LEAVE, "group", [0, 2], 1)  # no member
    bench.send(0, FrameType.LEAVE, "group", [0, 2], 57)
    bench.take(0)
    read = bench.send(0, FrameType.GET, "group/key", None)  # dropped with the group
    bench.cancel(0, read)
    assert bench.take(0) == [(FrameType.TIMED_OUT, read, (), "")]


def test_a_group_of_ranks_that_do_not_exist_cannot_be_left() -> None:
    bench = Bench(2)
    bench.join_all()
    bench.send(0, FrameType.LEAVE, "group", [0, 7], 0)
    bench.leave(0)  # what it still had to do with is looked at
    stored = bench.send(1, FrameType.SET, "key", b"")
    assert bench.take(1) == [(FrameType.REPLY, stored, None)]


def test_slow_joiners_are_named_every_few_seconds() -> None:
    bench = Bench(3)
    bench.join(0, 0)
    bench.wait(11)
    expected = "1 of 3 ranks have joined; waiting for rank 1 (not joined), rank 2 (not joined)"
    assert bench.notices == [expected, expected]


@pytest.mark.parametrize(
    ("rank", "world_size", "texts"),
    [
        (0, 3, ("world_size 2", "with world_size 3")),
        (0, 1, ("world_size 2", "with world_size 1")),
        (2, 2, ("ranks 0 to 1", "rank 2")),
        (1, 2, ("rank 1/2 has joined already",)),
    ],
)
def test_wrong_joins_are_refused_and_harm_nobody(rank, world_size, texts) -> None:
    bench = Bench(2)
    first = bench.join(1, 1)
    bench.take(1)
    bad = bench.join(9, rank, world_size)
    kind, sequence, refusal, text = bench.take(9)[0]
    assert (kind, sequence, refusal) == (FrameType.REFUSED, bad, REFUSED)
    assert all(part in text for part in texts)
    assert bench.closed == [9]
    bench.lose(9)
    bench.join(0, 0)
    assert bench.take(1) == [joined(first, 1)]


def test_who_has_ended_is_not_waited_for() -> None:
    bench = Bench(3)
    bench.join(0, 0)
    bench.end(1)
    [accepted, (kind, *failure, text)] = bench.take(0)
    assert (accepted[0], kind, *failure) == (FrameType.PULSE, FrameType.FAILED, 0, DEATH, 1, "joining", ())
    assert text == "rank 1/3 ended with exit code 0 without joining; the other ranks waited for it"
    bench.join(2, 2)  # too late for that generation, and there can be no other
    assert bench.take(2)[-1][0] is FrameType.FAILED
    bench.lose(0)
    bench.join(3, 0)
    assert bench.take(3)[-1][0] is FrameType.FAILED


def test_who_ends_after_its_generation_has_formed_harms_nobody() -> None:
    bench = Bench(2)
    bench.join_all()
    bench.leave(1)
    bench.end(1)
    bench.take(0)
    asked = bench.send(0, FrameType.SET, "key", b"1")
    assert bench.take(0) == [(FrameType.REPLY, asked, None)]


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
    assert bench.take(12)[-1] == joined(last, 1)


def test_death_fails_waiting_and_later_requests() -> None:
    bench = Bench(3)
    bench.join_all()
    bench.send(0, FrameType.EXCHANGE, "b", None, b"")
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


def test_reported_failure_reaches_all_and_answers_what_the_reporter_waits_for() -> None:
    bench = Bench(2)
    bench.join_all()
    bench.send(1, FrameType.EXCHANGE, "b", None, b"")
    bench.send(1, FrameType.REPORT_FAILURE, "ValueError: 7", None)
    for rank in range(2):
        [(kind, *failure, text)] = bench.take(rank)
        assert (kind, *failure) == (FrameType.FAILED, 0, DEATH, 1, "running", ())
        assert "ValueError: 7" in text
    assert bench.core._waits._by_connection == {}
    assert bench.core.next_deadline() is None


@pytest.mark.parametrize(("culprit", "named"), [(2, 2), (3, 1), (None, 1)])
def test_reported_failure_names_the_culprit(culprit, named) -> None:
    bench = Bench(3)
    bench.join_all()
    bench.send(1, FrameType.REPORT_FAILURE, "in all_reduce", culprit)
    [(kind, *failure, text)] = bench.take(0)
    assert (kind, *failure) == (FrameType.FAILED, 0, DEATH, named, "running", ())
    assert "rank 1/3 failed: in all_reduce" in text


def test_goodbye_leads_to_the_next_generation() -> None:
    bench = Bench(2)
    bench.join_all()
    bench.leave(0)
    held = bench.join(10, 0)
    assert bench.take(10) == [(FrameType.PULSE,)]  # rank 1 still lives in generation 1
    again = bench.join(11, 0)
    assert bench.take(11)[0][:2] == (FrameType.REFUSED, again)  # one held join per rank
    bench.leave(1)
    assert bench.take(10) == []
    other = bench.join(12, 1)
    assert bench.take(10) == [joined(held, 2)]
    assert bench.take(12)[-1] == joined(other, 2)


def test_held_joins_form_as_soon_as_the_generation_before_has_ended() -> None:
    bench = Bench(3)
    bench.join_all()
    for rank in (0, 1):
        bench.leave(rank)
        bench.join(10 + rank, rank)
    bench.lose(2)
    bench.inbox.clear()
    bench.join(12, 2)
    assert [bench.take(10 + rank)[-1][2][0] for rank in range(3)] == [2] * 3


def test_keys_do_not_outlive_their_generation() -> None:
    bench = Bench(1)
    bench.join(0, 0)
    bench.send(0, FrameType.SET, "k", b"v")
    bench.leave(0)
    bench.join(1, 0)
    bench.take(1)
    missing = bench.send(1, FrameType.GET, "k", None)
    bench.cancel(1, missing)
    assert bench.take(1) == [(FrameType.TIMED_OUT, missing, (), "")]


def test_get_waits_for_set_and_names_whom_it_waits_for() -> None:
    bench = Bench(3)
    bench.join_all()
    get = bench.send(0, FrameType.GET, "n", 2)
    put = bench.send(1, FrameType.SET, "n", b"5")
    assert bench.take(0) == [(FrameType.REPLY, get, b"5")]
    assert bench.take(1) == [(FrameType.REPLY, put, None)]
    late = bench.send(0, FrameType.GET, "m", 2)
    bench.cancel(0, late)
    assert bench.take(0) == [(FrameType.TIMED_OUT, late, (2,), "rank 2 (running)")]
    nobody = bench.send(0, FrameType.GET, "m", 3)
    assert bench.take(0)[0][:3] == (FrameType.REFUSED, nobody, INVALID)
    gone = bench.send(1, FrameType.DELETE, "n")
    assert bench.take(1) == [(FrameType.REPLY, gone, None)]
    bench.send(0, FrameType.GET, "n", 2)
    assert bench.take(0) == []


def test_get_from_a_rank_that_has_left_fails_at_once() -> None:
    bench = Bench(3)
    bench.join_all()
    waiting = bench.send(0, FrameType.GET, "n", 2)
    of_anybody = bench.send(1, FrameType.GET, "n", None)
    bench.leave(2)
    assert bench.take(0)[0][:5] == (FrameType.FAILED, waiting, DEATH, 2, "left")
    assert bench.take(1) == []  # another rank may set it
    late = bench.send(0, FrameType.GET, "n", 2)
    assert bench.take(0)[0][:5] == (FrameType.FAILED, late, DEATH, 2, "left")
    bench.send(0, FrameType.SET, "n", b"")
    assert bench.take(1) == [(FrameType.REPLY, of_anybody, b"")]


def test_exchange_gives_the_values_of_all_by_rank() -> None:
    bench = Bench(3)
    bench.join_all()
    sent = [bench.send(rank, FrameType.EXCHANGE, "x", None, b"of %d" % rank) for rank in (2, 0, 1)]
    values = [b"of 0", b"of 1", b"of 2"]
    assert [bench.take(c) for c in (2, 0, 1)] == [[(FrameType.VALUES, s, True, values)] for s in sent]


def test_exchange_of_much_comes_in_frames_of_their_size() -> None:
    bench = Bench(8)
    bench.join_all()
    for rank in range(8):
        bench.send(rank, FrameType.EXCHANGE, "x", None, bytes([rank]) * 40_000)
    pieces = bench.take(0)
    assert [piece[2] for piece in pieces] == [False] * 7 + [True]
    assert [value[:1] for piece in pieces for value in piece[3]] == [bytes([rank]) for rank in range(8)]
    bench.send(0, FrameType.EXCHANGE, "x", None, bytes(60_000 + 5_000))
    assert bench.take(0) == []
    big = Bench(16)
    big.join_all()
    bad = big.send(0, FrameType.EXCHANGE, "x", None, bytes(60_000))
    assert big.take(0)[0][:3] == (FrameType.REFUSED, bad, INVALID)


def test_barrier_deadline_withdraws_the_waiter_and_later_ones_hold() -> None:
    bench = Bench(3)
    bench.join_all()
    first = bench.send(0, FrameType.EXCHANGE, "b", None, b"")
    second = bench.send(1, FrameType.EXCHANGE, "b", None, b"")
    bench.cancel(0, first)
    bench.cancel(1, second)
    where = "rank 2 (running)"
    assert bench.take(0) == [(FrameType.TIMED_OUT, first, (2,), where)]
    assert bench.take(1) == [(FrameType.TIMED_OUT, second, (2,), where)]
    for _ in range(2):
        sent = [bench.send(rank, FrameType.EXCHANGE, "b", None, b"") for rank in (2, 0, 1)]
        assert [bench.take(c) for c in (2, 0, 1)] == [[(FrameType.REPLY, s, None)] for s in sent]
    bench.cancel(0, sent[1])  # it crossed the answer, and means nothing
    assert bench.inbox == {}


def test_barriers_of_different_ranks_are_different() -> None:
    bench = Bench(3)
    bench.join_all()
    pair = bench.send(0, FrameType.EXCHANGE, "b", [0, 1], b"")
    bench.send(2, FrameType.EXCHANGE, "b", None, b"")
    bench.send(1, FrameType.EXCHANGE, "b", [0, 1], b"")
    assert bench.take(0) == [(FrameType.REPLY, pair, None)]
    assert bench.take(2) == []
    for ranks in ([1, 2], [0, 7], []):
        bad = bench.send(0, FrameType.EXCHANGE, "b", ranks, b"")
        assert bench.take(0)[0][:3] == (FrameType.REFUSED, bad, INVALID)


def test_goodbye_fails_those_who_need_the_rank() -> None:
    bench = Bench(3)
    bench.join_all()
    barrier = bench.send(0, FrameType.EXCHANGE, "b", None, b"")
    bench.leave(2)
    assert bench.take(0)[0][:5] == (FrameType.FAILED, barrier, DEATH, 2, "left")
    late = bench.send(1, FrameType.EXCHANGE, "b", None, b"")
    assert bench.take(1)[0][:5] == (FrameType.FAILED, late, DEATH, 2, "left")
    pair = bench.send(0, FrameType.EXCHANGE, "b", [0, 1], b"")
    bench.send(1, FrameType.EXCHANGE, "b", [0, 1], b"")
    assert bench.take(0) == [(FrameType.REPLY, pair, None)]
    # A read fails once nobody else remains.
    bench.take(1)
    get = bench.send(0, FrameType.GET, "k", None)
    bench.leave(1)
    assert bench.take(0)[0][:4] == (FrameType.FAILED, get, DEATH, 1)


def test_messages_without_a_seat_end_the_connection() -> None:
    bench = Bench(2)
    bench.send(5, FrameType.SET, "k", b"v")
    assert bench.closed == [5]
    assert bench.inbox == {}


def test_requests_before_the_generation_has_formed_are_refused() -> None:
    bench = Bench(2)
    bench.join(0, 0)
    bench.take(0)
    early = bench.send(0, FrameType.SET, "k", b"v")
    assert bench.take(0)[0][:3] == (FrameType.REFUSED, early, REFUSED)
    again = bench.join(0, 0)
    assert bench.take(0)[0][:3] == (FrameType.REFUSED, again, REFUSED)


def test_one_connection_cannot_wait_for_everything() -> None:
    bench = Bench(2)
    bench.join_all()
    for number in range(64):
        bench.send(0, FrameType.GET, f"k{number}", None)
    too_many = bench.send(0, FrameType.GET, "one more", None)
    assert bench.take(0)[-1][:3] == (FrameType.REFUSED, too_many, REFUSED)
