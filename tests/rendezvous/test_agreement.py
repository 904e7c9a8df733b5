"""The core's agreements with a virtual clock: decisions, deadlines, departures; see test_agreement_orders.py."""

from __future__ import annotations

import gc
import sys

import pytest
from core_bench import Bench

from gradsync.rendezvous.frames import DEATH, INVALID, Decision, FrameType, event_key

AGREED, MISMATCH, LAUNCHED = Decision


class AgreeingBench(Bench):
    """Ranks 0 to world_size - 1 of one generation, each on the connection of its own number."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.join_all()

    def agree(self, rank, digest, position=0, *, group="g", ranks=None) -> int:
        return self.send(rank, FrameType.AGREE, group, position, digest, ranks)

    def tell_launched(self, rank, digest, position=0, *, group="g", text="") -> None:
        self.send(rank, FrameType.SET, event_key(group, position, rank), text.encode(), True)
        self.inbox.get(rank, []).pop()
        self.send(rank, FrameType.LAUNCHED, group, position, digest)

    def questions(self, rank: int) -> list[int]:
        """Takes the positions that this rank was asked about."""
        mine = self.inbox.get(rank, [])
        self.inbox[rank] = [m for m in mine if m[0] is not FrameType.ASKED]
        return [m[2] for m in mine if m[0] is FrameType.ASKED]

    def decisions(self, rank: int) -> list[tuple[int, Decision, int]]:
        """Takes what this rank's requests were answered: sequence, verdict, and the position that brought it."""
        self.questions(rank)
        messages = self.take(rank)
        assert {m[0] for m in messages} <= {FrameType.REPLY}, messages
        return [(sequence, Decision(verdict), position) for _, sequence, (verdict, position) in messages]

    def read(self, rank: int, key: str) -> bytes | None:
        self.take(rank)
        self.cancel(rank, self.send(rank, FrameType.GET, key, None))
        kind, *fields = self.take(rank)[-1]
        return fields[1] if kind is FrameType.REPLY else None

    def open_positions(self) -> int:
        [generation] = self.core._generations
        return sum(len(group.positions) for group in generation.agreements._groups.values())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_digests(world_size: int) -> None:
    bench = AgreeingBench(world_size)
    for position in range(3):
        sent = [bench.agree(rank, 2**64 - 1 - position, position) for rank in range(world_size)]
        assert [bench.decisions(rank) for rank in range(world_size)] == [[(s, AGREED, position)] for s in sent]
    assert bench.open_positions() == 0
    assert bench.core.next_deadline() is None


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("odd_one", [0, 1])
def test_different_digests_wait_for_the_last_one(world_size: int, odd_one: int) -> None:
    bench = AgreeingBench(world_size)
    sent = [bench.agree(rank, int(rank == odd_one), 5) for rank in range(world_size - 1)]
    assert [bench.decisions(rank) for rank in range(world_size - 1)] == [[]] * (world_size - 1)
    sent.append(bench.agree(world_size - 1, int(world_size - 1 == odd_one), 5))
    assert [bench.decisions(rank) for rank in range(world_size)] == [[(s, MISMATCH, 5)] for s in sent]
    # Nobody went ahead: they can go on.
    again = [bench.agree(rank, 9, 6) for rank in range(world_size)]
    assert [bench.decisions(rank) for rank in range(world_size)] == [[(s, AGREED, 6)] for s in again]


def test_first_question_is_passed_on_once_to_the_other_members() -> None:
    bench = AgreeingBench(4)
    bench.agree(1, 1, ranks=[0, 1, 3])
    assert [bench.questions(rank) for rank in range(4)] == [[0], [], [], [0]]
    bench.agree(3, 1, ranks=[0, 1, 3])
    assert [bench.questions(rank) for rank in range(4)] == [[]] * 4


def test_rank_that_went_ahead_with_something_else_is_told_to_all_who_ask() -> None:
    bench = AgreeingBench(4)
    waiting = bench.agree(1, 1, 3)
    bench.tell_launched(0, 7, 3, text="all_reduce of é")
    assert bench.decisions(1) == [(waiting, LAUNCHED, 3)]
    late = bench.agree(2, 7, 3)
    later = bench.agree(3, 7, 8)
    assert bench.decisions(2) == [(late, LAUNCHED, 3)]
    assert bench.decisions(3) == [(later, LAUNCHED, 3)]
    assert bench.read(1, event_key("g", 3, 0)) == "all_reduce of é".encode()
    # Positions before it are not touched, and may be found passed later.
    earlier = bench.agree(1, 1, 2)
    assert bench.decisions(1) == []
    bench.tell_launched(2, 4, 2)
    assert bench.decisions(1) == [(earlier, LAUNCHED, 2)]
    assert bench.open_positions() == 0


def test_rank_that_waits_further_on_is_told_where_it_went_ahead() -> None:
    bench = AgreeingBench(2)
    further = bench.agree(0, 5, 4)
    earlier = bench.agree(1, 1, 3)
    assert bench.questions(0) == [3]
    bench.tell_launched(0, 7, 3)
    assert bench.decisions(0) == [(further, LAUNCHED, 3)]
    assert bench.decisions(1) == [(earlier, LAUNCHED, 3)]


def test_late_word_is_kept_for_readers_after_the_verdict() -> None:
    bench = AgreeingBench(3)
    bench.agree(2, 1)
    bench.tell_launched(0, 7, text="first")
    bench.take(2)
    reading = bench.send(2, FrameType.GET, event_key("g", 0, 1), None)
    bench.tell_launched(1, 7, text="second")
    assert bench.take(2) == [(FrameType.REPLY, reading, b"second")]


def test_rank_that_went_ahead_with_the_same_counts_as_asking() -> None:
    bench = AgreeingBench(3)
    waiting = bench.agree(1, 7)
    bench.tell_launched(0, 7, text="not needed")
    assert bench.decisions(1) == []
    last = bench.agree(2, 7)
    assert bench.decisions(1) == [(waiting, AGREED, 0)]
    assert bench.decisions(2) == [(last, AGREED, 0)]
    assert bench.open_positions() == 0


def test_word_before_any_question_is_kept() -> None:
    bench = AgreeingBench(2)
    given_up = bench.agree(1, 1)
    bench.cancel(1, given_up)
    bench.take(1)
    bench.tell_launched(0, 7)
    again = bench.agree(1, 1)
    assert bench.decisions(1) == [(again, LAUNCHED, 0)]


def test_meaningless_words_are_left_out() -> None:
    bench = AgreeingBench(3)
    bench.tell_launched(0, 7, group="unknown", text="x")
    waiting = bench.agree(0, 1, ranks=[0, 1])
    bench.tell_launched(2, 7, text="no member")
    bench.tell_launched(0, 7, text="waits itself")
    assert bench.decisions(0) == []
    assert bench.open_positions() == 1
    last = bench.agree(1, 1, ranks=[0, 1])
    assert bench.decisions(0) == [(waiting, AGREED, 0)]
    assert bench.decisions(1) == [(last, AGREED, 0)]


def test_refusals() -> None:
    bench = AgreeingBench(3)
    bench.agree(0, 1)
    bench.tell_launched(1, 1)
    refused = [
        (bench.agree(0, 1), 0, "rank 0/3 has already asked about its collective at position 0 of group 'g'"),
        (bench.agree(1, 1), 1, "rank 1/3 has already launched its collective at position 0 of group 'g'; a rank asks"),
        (bench.agree(2, 1, ranks=[1, 2]), 2, "group 'g' has ranks (0, 1, 2), rank 2/3 asked with ranks (1, 2)"),
        (bench.agree(2, 1, ranks=[0, 1]), 2, "needs existing ranks that include rank 2/3"),
        (bench.agree(2, 1, ranks=[2, 3]), 2, "needs existing ranks that include rank 2/3, got (2, 3)"),
    ]
    for sequence, rank, text in refused:
        bench.questions(rank)
        kind, request, reason, said = bench.inbox[rank].pop(0)
        assert (kind, request, reason) == (FrameType.REFUSED, sequence, INVALID)
        assert text in said


def test_deadline_names_who_did_not_report_and_withdraws() -> None:
    bench = AgreeingBench(4)
    first = bench.agree(0, 1)
    second = bench.agree(1, 1)
    bench.tell_launched(2, 1)
    bench.cancel(0, first)
    bench.cancel(1, second)
    where = "rank 3 (running)"
    assert bench.take(0) == [(FrameType.TIMED_OUT, first, (3,), where)]
    assert bench.take(1)[1:] == [(FrameType.TIMED_OUT, second, (3,), where)]
    sent = {rank: bench.agree(rank, 1) for rank in (3, 1, 0)}
    assert {rank: bench.decisions(rank) for rank in sent} == {rank: [(s, AGREED, 0)] for rank, s in sent.items()}
    assert bench.open_positions() == 0


def test_nothing_is_left_of_a_question_that_is_given_up() -> None:
    bench = AgreeingBench(2)
    for position in range(100):
        bench.cancel(0, bench.agree(0, 1, position))
    assert bench.open_positions() == 0


def test_goodbye_fails_those_who_need_the_word() -> None:
    bench = AgreeingBench(3)
    told = bench.agree(0, 1, 0)
    bench.tell_launched(2, 1, 0)
    untold = bench.agree(1, 1, 1)
    pair = bench.agree(1, 1, group="pair", ranks=[0, 1])
    bench.send(2, FrameType.LEAVE, "", None, 0)
    bench.questions(1)
    assert [m[:5] for m in bench.take(1)] == [(FrameType.FAILED, untold, DEATH, 2, "left")]
    late = bench.agree(0, 1, 2)
    bench.questions(0)
    assert [m[:5] for m in bench.take(0)] == [(FrameType.FAILED, late, DEATH, 2, "left")]
    # What does not need the rank any more goes on.
    both = [bench.agree(1, 1, 0), bench.agree(0, 1, group="pair", ranks=[0, 1])]
    assert bench.decisions(0) == [(told, AGREED, 0), (both[1], AGREED, 0)]
    assert bench.decisions(1) == [(both[0], AGREED, 0), (pair, AGREED, 0)]
    assert bench.open_positions() == 0


def test_departure_of_the_asker_leaves_the_others_waiting_in_vain_no_longer() -> None:
    bench = AgreeingBench(3)
    bench.agree(0, 1)
    waiting = bench.agree(1, 1)
    bench.send(0, FrameType.LEAVE, "", None, 0)
    bench.questions(1)
    assert [m[:4] for m in bench.take(1)] == [(FrameType.FAILED, waiting, DEATH, 0)]


def test_death_fails_all_and_later_words_mean_nothing() -> None:
    bench = AgreeingBench(3)
    bench.agree(0, 1)
    bench.lose(2)
    assert [m[:4] for m in bench.take(0)] == [(FrameType.FAILED, 0, DEATH, 2)]
    bench.tell_launched(1, 7)
    late = bench.agree(0, 1)
    assert [m[:4] for m in bench.take(0)] == [(FrameType.FAILED, late, DEATH, 2)]
    assert bench.core.next_deadline() is None


def test_long_runs_keep_nothing() -> None:
    bench = AgreeingBench(2)

    def agree_often(positions: range) -> int:
        for position in positions:
            for rank in (0, 1):
                bench.agree(rank, position, position)
            bench.inbox.clear()
        return sys.getallocatedblocks()

    gc.disable()  # what only the collector would find counts as kept
    try:
        before = agree_often(range(5000))  # fills the interpreter's free lists
        after = agree_often(range(5000, 25_000))
    finally:
        gc.enable()
    assert after - before < 1000
    assert not any(bench.core._waits._by_connection.values())
