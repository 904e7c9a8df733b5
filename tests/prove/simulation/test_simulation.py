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

from gradsync.rendezvous import connection, roster, store
from gradsync.rendezvous.connection import Connection
from gradsync.rendezvous.liveness import Judgement, Peer, Peers
from gradsync.rendezvous.protocol import RendezvousCore
from gradsync.rendezvous.server import RendezvousServer
from gradsync.rendezvous.store import Keys
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
    original = RendezvousCore._fail_generation
    patch.setattr(RendezvousCore, "_fail_generation", lambda self, *args: original(self, *args)[1:])


def _the_next_rank_is_blamed(patch: pytest.MonkeyPatch) -> None:
    original = roster.Roster.death

    def blame(self: Any, rank: int, cause: str) -> Any:
        return original(self, (rank + 1) % len(self.members), cause)

    patch.setattr(roster.Roster, "death", blame)


def _a_silent_rank_is_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Peer, "judge", lambda self, now, state: Judgement.LOST)
    patch.setattr("gradsync.rendezvous.liveness.SILENT_AFTER_SECONDS", 0.2)


def _nobody_looks_at_silent_ranks(patch: pytest.MonkeyPatch) -> None:
    original = Peers.begin
    patch.setattr(Peers, "begin", lambda self, key, now: original(self, key, now) if key < 0 else None)


def _nobody_looks_at_ranks_that_have_not_come(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RendezvousCore, "_watch", lambda *_: None)


def _some_answers_wake_nobody(patch: pytest.MonkeyPatch) -> None:
    original = Connection._end

    def end(self: Connection, sequence: int, answer: Any) -> None:
        pending = self._pending.get(sequence)
        if pending is not None and answer is not None and sequence % 3 == 0:
            pending.answer = answer
        else:
            original(self, sequence, answer)

    patch.setattr(Connection, "_end", end)


def _a_rest_of_the_bytes_is_dropped(patch: pytest.MonkeyPatch) -> None:
    original = FrameReader.next_frame

    def next_frame(self: FrameReader) -> Any:
        frame = original(self)
        if frame is not None and len(self._buffer) - self._taken < 20:
            self._taken = len(self._buffer)
        return frame

    patch.setattr(FrameReader, "next_frame", next_frame)


def _a_barrier_releases_the_last_one_only(patch: pytest.MonkeyPatch) -> None:
    original = store._release
    patch.setattr(store, "_release", lambda barrier: original(barrier)[-1:])


def _a_read_is_not_answered(patch: pytest.MonkeyPatch) -> None:
    original = Keys.set
    patch.setattr(Keys, "set", lambda *args: original(*args)[:1])


def _closing_leaves_the_thread(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Connection, "close", lambda self: None)


def _the_wall_clock_is_asked(patch: pytest.MonkeyPatch) -> None:
    original = RendezvousServer._wait_seconds

    def wait_seconds(self: RendezvousServer) -> float | None:
        sys.modules[RendezvousServer.__module__].time.time()  # type: ignore[attr-defined]
        return original(self)

    patch.setattr(RendezvousServer, "_wait_seconds", wait_seconds)


def _a_failure_is_a_plain_error(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(connection, "failure_of", lambda message, label, operation="": ValueError(label))


def _departed_ranks_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(roster.Roster, "is_empty", lambda self: False)


MUTATIONS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    _one_member_is_not_told: "survivors_are_told_of_a_rank",
    _the_next_rank_is_blamed: "survivors_name_the_culprit",
    _a_silent_rank_is_given_up: "nothing_fails_unless_something_is_wrong",
    _nobody_looks_at_silent_ranks: "survivors_hear_of_it_in_time",
    _nobody_looks_at_ranks_that_have_not_come: "survivors_are_told_of_a_rank",
    _some_answers_wake_nobody: "nobody_waits_without_need",
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
    assert sys.modules[RendezvousServer.__module__].time is time
