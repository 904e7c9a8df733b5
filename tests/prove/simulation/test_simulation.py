"""A few seeds of the simulation, the script beside has the rest; one replays exactly; each check notices its fault."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from simulation.checks import complaints
from simulation.run import play
from simulation.scenario import HARMLESS, draw
from simulation_run import play_all

from gradsync.rendezvous import inbox, liveness, roster, verdict_texts
from gradsync.rendezvous.event_loop import EventLoop
from gradsync.rendezvous.inbox import Inbox
from gradsync.rendezvous.joining import Joining
from gradsync.rendezvous.keys import Keys
from gradsync.rendezvous.messages import FrameType
from gradsync.rendezvous.places import Barriers
from gradsync.rendezvous.protocol import RendezvousCore
from gradsync.rendezvous.request_channel import RequestChannel
from gradsync.rendezvous.silence import Judgement, Silence
from gradsync.rendezvous.wire import FrameReader

SEEDS = 1000
SHARDS = 4
_FIRST_OF_EACH_FAULT = {draw(seed).fault.kind: seed for seed in reversed(range(200))}


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_check_holds_for_every_seed(shard: int) -> None:
    summary = play_all(range(shard, SEEDS, SHARDS))
    assert summary.violations == []
    assert summary.felt["crash"] > 0  # the faults do reach somebody
    assert sum(summary.felt[kind] for kind in HARMLESS) == 0


@pytest.mark.parametrize("seed", sorted(_FIRST_OF_EACH_FAULT.values()))
def test_a_seed_replays_exactly(seed: int) -> None:
    first, second = play(seed), play(seed)
    assert first.trace == second.trace
    assert [repr(diary.error) for diary in first.diaries] == [repr(diary.error) for diary in second.diaries]


def test_a_seed_replays_in_another_process_too() -> None:
    """Where hashes of texts are others, and other seeds were played before."""
    command = [sys.executable, str(Path(__file__).with_name("simulation_run.py")), "--seed", "13", "--trace"]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert f"trace {play(13).digest}" in done.stdout


def test_another_seed_is_another_run() -> None:
    assert play(1).digest != play(2).digest


def complained_of(seeds: int = 200) -> Iterator[str]:
    """The checks that complain, seed by seed."""
    for seed in range(seeds):
        yield from (complaint.split(":")[0] for complaint in complaints(play(seed)))


def _one_member_is_not_told(patch: pytest.MonkeyPatch) -> None:
    original = RendezvousCore._poison
    patch.setattr(RendezvousCore, "_poison", lambda self, *args, **options: original(self, *args, **options)[1:])


def _the_next_rank_is_blamed(patch: pytest.MonkeyPatch) -> None:
    original = verdict_texts.death

    def blame(roster: Any, rank: int, cause: str) -> Any:
        return original(roster, (rank + 1) % len(roster.members), cause)

    patch.setattr(verdict_texts, "death", blame)


def _a_silent_rank_is_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Silence, "judge", lambda self, now, finding: Judgement.LOST)
    patch.setattr("gradsync.rendezvous.silence.SILENT_AFTER_SECONDS", 0.2)


def _nobody_looks_at_silent_ranks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RendezvousCore, "_introduce", lambda *_: [])


def _nobody_looks_at_ranks_that_have_not_come(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Joining, "_looks", lambda *_: [])


def _who_stops_reading_wakes_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Inbox, "_end_reading", lambda self: setattr(self, "_is_read", False))


def _a_rest_of_the_bytes_is_dropped(patch: pytest.MonkeyPatch) -> None:
    original = FrameReader.next_frame

    def next_frame(self: FrameReader) -> Any:
        frame = original(self)
        if frame is not None and len(self._buffer) < 20:
            self._buffer.clear()
        return frame

    patch.setattr(FrameReader, "next_frame", next_frame)


def _a_barrier_releases_the_last_one_only(patch: pytest.MonkeyPatch) -> None:
    original = Barriers._release
    patch.setattr(Barriers, "_release", lambda self, barrier: original(self, barrier)[-1:])


def _a_read_is_not_answered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Keys, "_answer_waiting", lambda *_: [])


def _closing_leaves_the_thread(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(liveness.Liveness, "end", lambda self: None)
    patch.setattr(RequestChannel, "close", lambda self: self._connection.post(FrameType.BYE))


def _the_wall_clock_is_asked(patch: pytest.MonkeyPatch) -> None:
    original = EventLoop._wait_seconds

    def wait_seconds(self: EventLoop) -> float | None:
        sys.modules[EventLoop.__module__].time.time()  # type: ignore[attr-defined]
        return original(self)

    patch.setattr(EventLoop, "_wait_seconds", wait_seconds)


def _a_failure_is_a_plain_error(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(inbox, "failure_of", lambda message, who: ValueError(who))


def _departed_ranks_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(roster.Roster, "is_deserted", lambda self: False)


MUTATIONS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    _one_member_is_not_told: "survivors_are_told_of_a_rank",
    _the_next_rank_is_blamed: "survivors_name_the_culprit",
    _a_silent_rank_is_given_up: "nothing_fails_unless_something_is_wrong",
    _nobody_looks_at_silent_ranks: "survivors_hear_of_it_in_time",
    _nobody_looks_at_ranks_that_have_not_come: "survivors_are_told_of_a_rank",
    _who_stops_reading_wakes_nobody: "nobody_waits_without_need",
    _a_rest_of_the_bytes_is_dropped: "nothing_fails_unless_something_is_wrong",
    _a_barrier_releases_the_last_one_only: "nothing_fails_unless_something_is_wrong",
    _a_read_is_not_answered: "nothing_fails_unless_something_is_wrong",
    _closing_leaves_the_thread: "nothing_is_left",
    _the_wall_clock_is_asked: "nothing_is_left",
    _a_failure_is_a_plain_error: "every_error_is_one_of_ours",
    _departed_ranks_are_kept: "nothing_is_left",
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__.strip("_"))
def test_broken_code_is_noticed(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch) -> None:
    mutation(monkeypatch)
    assert MUTATIONS[mutation] in complained_of()


def test_the_modules_have_their_own_names_back() -> None:
    play(0)
    assert sys.modules[EventLoop.__module__].time is time
