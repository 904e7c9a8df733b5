"""Members of groups: all ranks are one range, however a request names them."""

from __future__ import annotations

import pytest
from core_bench import Bench

from gradsync.rendezvous.members import are_known, list_members, members_of
from gradsync.rendezvous.messages import FrameType
from gradsync.rendezvous.roster import Roster


def test_all_ranks_are_the_same_however_they_are_named() -> None:
    assert members_of(None, 3) == members_of([0, 1, 2], 3) == range(3)
    assert members_of([0, 2], 3) == (0, 2)


def test_ranks_that_do_not_exist_are_not_taken_for_all() -> None:
    members = members_of([0, 1, 3], 3)
    assert members == (0, 1, 3)
    assert not are_known(members, 3)
    assert not are_known(members_of([], 3), 3)
    assert are_known(members_of(None, 3), 3)


def test_they_are_shown_one_by_one() -> None:
    assert list_members(members_of(None, 3)) == "(0, 1, 2)"


def test_a_barrier_of_all_meets_one_that_names_them() -> None:
    bench = Bench(3)
    bench.join_all()
    for rank, ranks in enumerate([None, [0, 1, 2], None]):
        bench.send(rank, FrameType.BARRIER, "b", ranks, 1000)
    assert [bench.take(rank)[0][0] for rank in range(3)] == [FrameType.REPLY] * 3


def test_a_refusal_shows_all_ranks() -> None:
    bench = Bench(2)
    bench.join_all()
    bench.send(0, FrameType.GET_ID, "g", 0, None, 1000)
    bench.send(1, FrameType.GET_ID, "g", 1, None, 1000)
    assert "root 0 and ranks (0, 1), rank 1/2 asked with root 1 and ranks (0, 1)" in bench.take(1)[0][3]


@pytest.mark.parametrize("ends", [["give_up", "mark_left", "mark_dead"], ["mark_dead", "mark_left", "give_up"]])
def test_a_roster_is_deserted_once_all_have_gone(ends: list[str]) -> None:
    roster = Roster(4)
    assert roster.is_deserted()
    for rank in range(3):
        roster.seat(rank, rank + 10)
    roster.mark_dead(3, 13)  # of a rank that was never seated, or gave up before
    for rank, end in enumerate(ends):
        assert not roster.is_deserted()
        getattr(roster, end)(rank, *([rank + 10] if end == "mark_dead" else []))
    assert roster.is_deserted()
    roster.seat(ends.index("give_up"), 20)
    assert not roster.is_deserted()
