"""A sample of the model check, small spaces whole; and each invariant notices what it is there for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from exploration.configuration import Configuration
from exploration.configurations import CONFIGURATIONS
from exploration.sealed_frames import wrongly_cut, wrongly_taken
from exploration.search import Search, tell
from exploration.steps import absent, barrier, get_key, set_key, waiting

from gradsync.rendezvous import protocol
from gradsync.rendezvous.frames import FrameType
from gradsync.rendezvous.liveness import Peers
from gradsync.rendezvous.protocol import RendezvousCore
from gradsync.rendezvous.roster import Roster
from gradsync.rendezvous.store import Exchange, Keys
from gradsync.rendezvous.stuck import StuckCollective, StuckCollectives
from gradsync.rendezvous.wire import Session

STATES = 700  # of each configuration; `make prove` goes through all


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda configuration: configuration.name)
def test_every_invariant_holds(configuration: Configuration) -> None:
    result = Search(configuration, most_states=STATES).run()
    assert result.counterexample is None, "\n".join(tell(configuration, result.counterexample))
    assert result.is_closed or result.states >= STATES


def test_a_small_space_is_gone_through_whole_and_the_same_every_time() -> None:
    configuration = Configuration("pair", "", ((barrier(),), (barrier(),)), rare={"crash": 1})
    first, second = (Search(configuration).run() for _ in range(2))
    assert first.is_closed
    assert (first.states, first.moves, first.depth) == (second.states, second.moves, second.depth)


def test_a_session_takes_its_own_frames_in_order_and_no_other() -> None:
    assert list(wrongly_taken(4)) == []
    assert list(wrongly_cut()) == []


PAIR = Configuration("pair", "", ((barrier(),), (barrier(),)), rare={"crash": 1, "report": 1, "cancel": 1, "leave": 1})
MEETING = Configuration("meeting", "", ((), (), ()), attempts=2, is_formed=False, rare={"crash": 2, "impostor": 1})
THREE = Configuration("three", "", ((barrier(),), (), ()), rare={"crash": 2, "leave": 1, "report": 2})
READING = Configuration("reading", "", ((set_key("k", b"1"), set_key("k", b"2")), (get_key("k"),)))
SILENT = Configuration("silent", "", ((), ()), listens=True, rare={"leave": 2, "stop": 1})
MISSING = Configuration("missing", "", ((waiting(1), absent(1)), (), ()))
FRAMES = Configuration("frames", "", ((barrier(), barrier()), ()), has_frames=True, rare={"tamper": 1})


def found(configuration: Configuration) -> str:
    """The invariant that does not hold, or nothing."""
    result = Search(configuration, most_states=4000).run()
    return "" if result.counterexample is None else result.counterexample.complaint.split(":")[0]


def _one_member_is_not_told(patch: pytest.MonkeyPatch) -> None:
    original = RendezvousCore._fail_generation
    patch.setattr(RendezvousCore, "_fail_generation", lambda self, *args: original(self, *args)[1:])


def _a_member_is_told_twice(patch: pytest.MonkeyPatch) -> None:
    original = RendezvousCore._fail_generation

    def poison(self: RendezvousCore, generation: Any, failure: Any, **options: Any) -> Any:
        generation.failure = None
        return original(self, generation, failure, **options)

    patch.setattr(RendezvousCore, "_fail_generation", poison)


def _a_join_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = RendezvousCore._form
    patch.setattr(RendezvousCore, "_form", lambda self, generation: original(self, generation)[1:])


def _a_generation_forms_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "is_complete", lambda self: len(self.members) >= self.world_size - 1)


def _the_next_rank_is_blamed(patch: pytest.MonkeyPatch) -> None:
    original = Roster.death
    patch.setattr(Roster, "death", lambda self, rank, cause: original(self, (rank + 1) % 2, cause))


def _the_failed_generation_goes_on(patch: pytest.MonkeyPatch) -> None:
    original = RendezvousCore._receive

    def receive(self: RendezvousCore, now: float, connection: int, message: Any, generation: Any, rank: int) -> Any:
        failure, generation.failure = generation.failure, None
        try:
            return original(self, now, connection, message, generation, rank)
        finally:
            generation.failure = generation.failure or failure

    patch.setattr(RendezvousCore, "_receive", receive)


def _a_barrier_lets_one_through(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Exchange, "is_complete", property(lambda self: bool(self.values)))


def _who_gave_up_still_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Exchange, "withdraw", lambda self, wait: None)


def _deadlines_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    original = RendezvousCore._cancel
    patch.setattr(RendezvousCore, "_cancel", lambda self, *args: [a for a in original(self, *args) if a is None])
    patch.setitem(protocol._OF_CORE, FrameType.CANCEL, RendezvousCore._cancel)


def _clocks_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Peers, "end", lambda self, key: None)


def _rounds_are_kept_open(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Exchange, "close", lambda self: list(self.waits.values()))


def _the_first_value_stays(patch: pytest.MonkeyPatch) -> None:
    original = Keys.set
    patch.setattr(Keys, "set", lambda self, r, key, value: original(self, r, key, self._values.get(key, value)))


def _who_waits_is_missed(patch: pytest.MonkeyPatch) -> None:
    original = StuckCollectives._all_stuck

    def all_stuck(self: StuckCollectives, reports: Any) -> list[StuckCollective]:
        [told] = original(self, reports)
        return [dataclasses.replace(told, waiting=told.missing, missing=told.waiting)]

    patch.setattr(StuckCollectives, "_all_stuck", all_stuck)


def _a_frame_is_taken_again(patch: pytest.MonkeyPatch) -> None:
    original = Session.open

    def open_any(self: Session, frame: Any) -> Any:
        self._receive_sequence = frame.sequence
        return original(self, frame)

    patch.setattr(Session, "open", open_any)


def _the_core_stumbles(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "death", lambda self, rank, cause: self.members.pop(rank)._)


BROKEN: list[tuple[Callable[[pytest.MonkeyPatch], None], Configuration, str]] = [
    (_one_member_is_not_told, THREE, "each_present_member_is_told_a_failure_once"),
    (_a_member_is_told_twice, THREE, "each_present_member_is_told_a_failure_once"),
    (_a_join_is_forgotten, MEETING, "a_generation_forms_of_all_ranks_at_once"),
    (_a_generation_forms_too_early, MEETING, "a_generation_forms_of_all_ranks_at_once"),
    (_the_next_rank_is_blamed, THREE, "the_first_cause_is_named"),
    (_the_failed_generation_goes_on, THREE, "requests_of_a_failed_generation_fail"),
    (_a_barrier_lets_one_through, PAIR, "a_barrier_releases_all_or_none"),
    (_who_gave_up_still_counts, PAIR, "no_answer_without_a_request_and_none_twice"),
    (_deadlines_are_not_kept, PAIR, "a_cancel_is_answered"),
    (_clocks_are_kept, SILENT, "nothing_is_kept_of_who_has_gone"),
    (_rounds_are_kept_open, PAIR, "the_core_keeps_the_same_books"),
    (_the_first_value_stays, READING, "values_are_those_that_were_set"),
    (_who_waits_is_missed, MISSING, "nobody_who_came_is_absent"),
    (_a_frame_is_taken_again, FRAMES, "the_core_keeps_the_same_books"),
    (_the_core_stumbles, THREE, "the_core_never_raises"),
]


@pytest.mark.parametrize(("mutation", "configuration", "invariant"), BROKEN)
def test_broken_code_is_noticed(mutation, configuration, invariant, monkeypatch) -> None:
    mutation(monkeypatch)
    assert found(configuration) == invariant


def test_a_session_that_takes_frames_again_is_noticed(monkeypatch) -> None:
    _a_frame_is_taken_again(monkeypatch)
    assert any("was taken as number" in what for what in wrongly_taken(2))


def test_a_counterexample_is_told_move_by_move(monkeypatch) -> None:
    _one_member_is_not_told(monkeypatch)
    result = Search(THREE).run()
    assert result.counterexample is not None
    story = "\n".join(tell(THREE, result.counterexample))
    assert "1. crash 0" in story
    assert "FAILED" in story
    assert "violated: each_present_member_is_told_a_failure_once" in story
