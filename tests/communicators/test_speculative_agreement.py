"""SpeculativeAgreement: whoever goes ahead goes ahead with what the others do, or all are told."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_at_a_time import Baton, Client, Rendezvous

import gradsync as gs
from gradsync.communicators import failures
from gradsync.communicators.agreement import Agreement, Description
from gradsync.communicators.failures import FailureMonitor
from gradsync.communicators.nccl import speculative_agreement
from gradsync.communicators.nccl.speculative_agreement import History, SpeculativeAgreement
from gradsync.diagnostics.recorder import FlightRecorder


def agreement(digest: int) -> Agreement:
    return Agreement(digest, lambda: Description(f"event {digest}"))


def made(client: Any, seconds: float = 30.0) -> SpeculativeAgreement:
    recorder = FlightRecorder("world")
    recorder.begin(agreement(1))
    label = f"rank {client.rank}/{client.world_size}"
    return SpeculativeAgreement(client, "world", label, seconds, FailureMonitor(client, recorder))


def go_on(agreements: SpeculativeAgreement, digest: int) -> None:
    """As a backend does it."""
    if not agreements.repeats(agreement(digest)):
        agreements.ask(agreement(digest))


# The history.


def test_what_followed_once_is_predicted() -> None:
    history = History()
    step = [1, 2, 3, 4]
    predicted = []
    for digest in step * 3:
        predicted.append(history.expected == digest)
        history.append(digest)
    assert predicted == [False] * 8 + [True] * 4
    assert history.expected != 2


def test_the_last_follower_counts() -> None:
    history = History()
    for digest in [1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1, 2, 3, 4]:
        history.append(digest)
    assert history.expected != 5
    assert history.expected == 6


def test_a_disagreement_begins_a_new_context() -> None:
    history = History()
    for digest in [7, 7, 7, 7, 7, 7]:
        history.append(digest)
    assert history.expected == 7
    for _ in range(2):
        history.break_off()
        for _ in range(4):
            assert history.expected != 7  # a context that there never was, whatever followed the last break
            history.append(7)
        assert history.expected == 7


def test_ranks_that_differed_once_are_not_sure_to_go_on_alike() -> None:
    # The first event came from the very beginning only: it must not be expected again after the mismatch.
    ranks, _ = play([[3, 5, 3, 7], [3, 6, 9, 7]], [0, 1] * 100)
    assert [rank.events for rank in ranks] == [["launched", "refused", "refused", "launched"]] * 2


def test_a_history_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative_agreement, "_MAX_CONTEXTS", 10)
    history = History()
    for digest in range(1000):
        history.append(digest)
    assert len(history._next_by_context) <= 10


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 3))
def test_one_event_at_most_is_predicted(events: list[int], broken_off_after: int) -> None:
    mine, other = History(), History()
    for digest in events:
        assert sum(mine.expected == candidate for candidate in range(4)) <= 1
        for history in (mine, other):
            history.append(digest)
            if digest == broken_off_after:
                history.break_off()
        # Ranks with one past predict the same: of two that differ, at least one has to ask.
        assert [mine.expected == c for c in range(4)] == [other.expected == c for c in range(4)]


# Several ranks.


class Rank:
    """A rank that plays a list of events.

    Attributes:
        events: by position: "launched", "refused", or "broken".
    """

    def __init__(self, rendezvous: Rendezvous, rank: int, digests: list[int]) -> None:
        self.agreements = made(Client(rendezvous, rank))
        self.digests = digests
        self.events: list[str] = []
        self.overtaken: gs.PlanMismatch | None = None
        self.errors: list[gs.PlanMismatch] = []

    def play(self) -> None:
        for digest in self.digests:
            try:
                go_on(self.agreements, digest)
            except gs.PlanMismatch as error:
                self.events.append("broken" if error.broken else "refused")
                self.errors.append(error)
                if error.broken:
                    return
            else:
                self.events.append("launched")

    def has_been_told(self) -> bool:
        return self.events[-1] == "broken" or self.agreements.overtaken() is not None


def play(
    programs: list[list[int]], choices: list[int], world_ranks: list[int] | None = None
) -> tuple[list[Rank], Rendezvous]:
    baton = Baton(len(programs), choices)
    rendezvous = Rendezvous(len(programs), baton, world_ranks)
    ranks = [Rank(rendezvous, rank, digests) for rank, digests in enumerate(programs)]
    baton.run([rank.play for rank in ranks])
    return ranks, rendezvous


steps = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@st.composite
def programs(draw: Any) -> list[list[int]]:
    """Steps that repeat themselves, on all ranks; now and then one rank does something else."""
    repeated = draw(st.lists(st.tuples(steps, st.integers(1, 8)), min_size=1, max_size=3))
    common = [digest for step, times in repeated for digest in step * times]
    lists = [list(common) for _ in range(draw(st.integers(2, 3)))]
    for _ in range(draw(st.integers(0, 3))):
        strayed = lists[draw(st.integers(0, len(lists) - 1))]
        strayed[draw(st.integers(0, len(common) - 1))] = draw(st.integers(0, 9))
    return lists


@given(programs(), st.lists(st.integers(0, 5), max_size=200))
def test_ranks_never_launch_what_others_do_not(lists: list[list[int]], choices: list[int]) -> None:
    ranks, rendezvous = play(lists, choices)
    for position, digests in enumerate(zip(*lists, strict=True)):
        events = [rank.events[position] if position < len(rank.events) else "" for rank in ranks]
        if len(set(digests)) == 1:
            assert events == ["launched"] * len(ranks)
            continue
        assert any((position, rank) in rendezvous.asked for rank in range(len(ranks)))
        launched = {digest for digest, event in zip(digests, events, strict=True) if event == "launched"}
        assert len(launched) <= 1
        if launched:  # by prediction: too late to be undone, but nobody goes on
            assert "refused" not in events
            assert all(rank.has_been_told() for rank in ranks)
            return
        assert events == ["refused"] * len(ranks)
    assert not any(rank.has_been_told() for rank in ranks)


@given(steps, st.lists(st.integers(0, 5), max_size=100))
def test_a_loop_stops_asking(step: list[int], choices: list[int]) -> None:
    ranks, rendezvous = play([step * 12] * 2, choices)
    assert all(set(rank.events) == {"launched"} for rank in ranks)
    assert max(position for position, _ in rendezvous.asked) < 4 + 2 * len(step)


def test_a_rank_that_went_on_is_told_where_it_strayed() -> None:
    # Rank 0 goes ahead by several events, and then asks about another one; rank 1 has strayed long before.
    ranks, _ = play([[1, 1, 1, 1, 1, 1, 1, 1, 5], [1, 1, 1, 1, 1, 1, 2, 1, 1]], [0] * 200)
    error = ranks[0].agreements.overtaken()
    assert error is None, "it has been told already"
    assert ranks[0].events == ["launched"] * 8 + ["broken"]
    assert ranks[1].events == ["launched"] * 6 + ["broken"]


@pytest.mark.parametrize("strays_after", [0, 6])
def test_ranks_of_a_group_are_called_as_in_the_world(strays_after: int) -> None:
    common = [1] * strays_after
    ranks, _ = play([[*common, 3], [*common, 5]], [0] * 200, world_ranks=[7, 2])
    first, last = (rank.errors[0] for rank in ranks)
    assert set(first.descriptions) == {7, 2}
    assert last.descriptions == {7: "event 3", 2: "event 5"}  # whoever comes last finds both


# What is said.


def single(monkeypatch: pytest.MonkeyPatch, seconds: float = 30.0) -> tuple[SpeculativeAgreement, Rendezvous, Client]:
    """Returns rank 0 of 2, on a thread of its own: nothing pauses."""
    baton = Baton(2, [])
    monkeypatch.setattr(baton, "pause", lambda rank, until=None: None)
    rendezvous = Rendezvous(2, baton)
    client = Client(rendezvous, 0)
    return made(client, seconds), rendezvous, client


@pytest.mark.parametrize("length", [0, 5, 49_151, 49_152, 49_153, 98_304, 150_000])
def test_long_descriptions_arrive_whole(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    _, rendezvous, mine = single(monkeypatch)
    text = "".join(chr(ord("a") + i % 26) for i in range(length))
    failures.publish_description(mine, "world", 3, text)  # type: ignore[arg-type]
    read = failures._read_description(Client(rendezvous, 1), "world", 3, 0, 0.0)  # type: ignore[arg-type]
    assert read == text
    assert all(len(value) <= 49_152 for value in rendezvous.keys.values())


def time_out(client: Client, *_: Any, **__: Any) -> Any:
    raise gs.RendezvousTimeout("missing: rank 1 (computing)", missing_ranks=(1,))


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, _, client = single(monkeypatch, seconds=1.01)
    monkeypatch.setattr(client, "agree", partial(time_out, client))
    monkeypatch.setattr(failures, "WARN_AFTER_SECONDS", 0.0)
    reports: list[Any] = []

    def report_stuck(*report: Any) -> Any:
        reports.append(report)
        raise gs.CollectiveTimeout("the verdict")

    client.report_waiting = lambda *report: reports.append(report)  # type: ignore[attr-defined]
    client.report_stuck = report_stuck  # type: ignore[attr-defined]
    with pytest.raises(gs.CollectiveTimeout, match="the verdict"):
        go_on(mine, 1)
    warned, given_up = reports
    assert warned[:3] == given_up[:3] == ("world", 1, "event #1 (1)")
    assert warned[4] == given_up[4] == (1,)


@pytest.mark.parametrize("came_to", [0, 1])
def test_a_rank_that_has_closed_is_named(monkeypatch: pytest.MonkeyPatch, came_to: int) -> None:
    mine, rendezvous, client = single(monkeypatch, seconds=0.5)
    other = made(Client(rendezvous, 1))
    other.position = came_to
    other.announce_closed()
    monkeypatch.setattr(client, "agree", partial(time_out, client))
    # A rank that had been here before it closed will not answer either.
    with pytest.raises(gs.RankFailed) as caught:
        go_on(mine, 1)
    assert caught.value.rank == 1


def test_a_member_that_has_closed_is_called_as_in_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    baton = Baton(2, [])
    monkeypatch.setattr(baton, "pause", lambda rank, until=None: None)
    rendezvous = Rendezvous(2, baton, world_ranks=[4, 9])
    mine, other = (made(Client(rendezvous, rank)) for rank in range(2))
    mine.raise_if_closed(0)
    other.announce_closed()
    with pytest.raises(gs.RankFailed, match="rank 9 closed") as caught:
        mine.raise_if_closed(0)
    assert caught.value.rank == 9
    other.raise_if_closed(0)  # it does not miss itself
