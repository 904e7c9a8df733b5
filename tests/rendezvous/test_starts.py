"""Launchers and their ranks on one server: starts, who may join, what launchers say of processes; a virtual clock."""

from __future__ import annotations

import pytest
from core_bench import Bench

from gradsync.rendezvous.frames import (
    INVALID,
    REFUSED,
    SILENCE,
    FrameType,
    MakeRoom,
    Message,
    Received,
)
from gradsync.rendezvous.liveness import ProcessState
from gradsync.rendezvous.protocol import LaunchersCore

LAUNCHERS = (0, 1)  # their connections
RANKS = (10, 11)  # those of their ranks
PIDS = (4711, 4712)


class StartsBench(Bench):
    """Two launchers, each with one rank."""

    def __init__(self) -> None:
        super().__init__(2)
        self.core = LaunchersCore(2, machine="this machine")  # type: ignore[assignment]
        for node, connection in enumerate(LAUNCHERS):
            self.join(connection, node)
        self.inbox.clear()

    def begin(self, start: str = "a") -> None:
        for connection in LAUNCHERS:
            sequence = self.send(connection, FrameType.BEGIN_START, start, 2)
            assert self.take(connection) == [(FrameType.REPLY, sequence, None)]

    def join_rank(self, rank: int, start: str = "a", pid: int = 0) -> int:
        return self.join(RANKS[rank], rank, start=start, pid=pid)

    def answer_looks(self, node: int, state: ProcessState) -> int:
        """Answers the looks that a launcher is asked for; returns how many."""
        looks = [message[1:] for message in self.take(LAUNCHERS[node]) if message[0] is FrameType.INSPECT]
        for rank, pid in looks:
            assert (rank, pid) == (node, PIDS[node])
            self.send(LAUNCHERS[node], FrameType.INSPECTED, rank, state.name)
        return len(looks)


@pytest.fixture
def bench() -> StartsBench:
    return StartsBench()


def joined(bench: StartsBench, rank: int) -> list[tuple]:
    return [message for message in bench.take(RANKS[rank]) if message[0] is FrameType.REPLY]


def test_ranks_meet_beside_their_launchers(bench: StartsBench) -> None:
    bench.begin()
    for rank in range(2):
        bench.join_rank(rank)
    for rank in range(2):
        assert [fields for _, _, fields in joined(bench, rank)] == [(1,)]
    sequence = bench.send(RANKS[0], FrameType.SET, "key", b"ranks", True)
    assert bench.take(RANKS[0])[-1] == (FrameType.REPLY, sequence, True)
    sequence = bench.send(LAUNCHERS[0], FrameType.SET, "key", b"launchers", False)
    assert bench.take(LAUNCHERS[0]) == [(FrameType.REPLY, sequence, True)]  # each world has keys of its own


def test_a_rank_of_another_start_is_refused(bench: StartsBench) -> None:
    bench.join_rank(0)
    [(kind, _, reason, text)] = bench.take(RANKS[0])
    assert (kind, reason, bench.closed) == (FrameType.REFUSED, REFUSED, [RANKS[0]])
    assert "rank 0 belongs to another start or restart of this run, not to the current one" in text


def test_the_next_start_turns_the_ranks_of_the_last_one_away(bench: StartsBench) -> None:
    bench.begin("a")
    for rank in range(2):
        bench.join_rank(rank)
    bench.begin("b")
    assert bench.closed == list(RANKS)
    for connection in RANKS:
        bench.lose(connection)
    bench.closed.clear()
    bench.inbox.clear()
    bench.join_rank(0, "a")
    assert bench.take(RANKS[0])[0][0] is FrameType.REFUSED
    bench.closed.clear()
    for rank in range(2):
        bench.join_rank(rank, "b")
    assert len(joined(bench, 0)) == 1


def test_there_is_room_for_the_ranks(bench: StartsBench) -> None:
    begin = Message(FrameType.BEGIN_START, 99, ("a", 3000))
    assert MakeRoom(3000) in bench.core.handle(bench.now, Received(LAUNCHERS[0], begin))
    assert MakeRoom(3000) not in bench.core.handle(bench.now, Received(LAUNCHERS[1], begin))  # it is there


def test_only_launchers_of_a_running_generation_begin_a_start(bench: StartsBench) -> None:
    bench.begin("a")
    bench.lose(LAUNCHERS[1])
    bench.take(LAUNCHERS[0])
    sequence = bench.send(LAUNCHERS[0], FrameType.BEGIN_START, "b", 2)
    [(kind, answered, *_)] = bench.take(LAUNCHERS[0])
    assert (kind, answered) == (FrameType.FAILED, sequence)
    bench.join_rank(0, "a")
    sequence = bench.send(RANKS[0], FrameType.BEGIN_START, "c", 2)  # a rank is no launcher
    assert (FrameType.REFUSED, sequence) in [message[:2] for message in bench.take(RANKS[0])]


def test_a_launcher_joins_no_start_itself(bench: StartsBench) -> None:
    bench.begin()
    sequence = bench.join(LAUNCHERS[0], 0, start="a")
    [(kind, answered, *_)] = bench.take(LAUNCHERS[0])
    assert (kind, answered) == (FrameType.REFUSED, sequence)
    bench.lose(LAUNCHERS[0])  # it still counts as a launcher
    assert FrameType.FAILED in [message[0] for message in bench.take(LAUNCHERS[1])]


def test_the_empty_name_is_a_start_like_others(bench: StartsBench) -> None:
    sequence = bench.join_rank(0, "")
    assert [message[:2] for message in bench.take(RANKS[0])] == [(FrameType.REFUSED, sequence)]
    bench.closed.clear()
    bench.begin("")
    for rank in range(2):
        bench.join_rank(rank, "")
    assert joined(bench, 0)


def test_a_rank_that_ends_before_it_joins_fails_those_that_wait(bench: StartsBench) -> None:
    bench.begin()
    bench.join_rank(0)
    bench.send(LAUNCHERS[1], FrameType.ENDED, 1, "ended with exit code 0")
    [failure] = [message for message in bench.take(RANKS[0]) if message[0] is FrameType.FAILED]
    assert failure[3] == 1
    assert "rank 1/2 ended with exit code 0 without joining" in failure[-1]


@pytest.mark.parametrize(
    ("begins", "fields"),
    [
        (True, (FrameType.STARTED, 2, 4713)),
        (True, (FrameType.ENDED, 2, "ended with exit code 0")),
        (False, (FrameType.ENDED, 0, "ended with exit code 0")),
    ],
)
def test_a_process_of_a_rank_outside_the_start_is_refused(bench: StartsBench, begins: bool, fields: tuple) -> None:
    if begins:
        bench.begin()
        bench.join_rank(0)
        bench.inbox.clear()
    sequence = bench.send(LAUNCHERS[1], *fields)
    text = f"got {fields[0].name} for rank {fields[1]}; the current start of the run has {2 if begins else 0} ranks"
    assert bench.take(LAUNCHERS[1]) == [(FrameType.REFUSED, sequence, INVALID, text)]
    bench.wait(2.0)  # the ranks of the start still wait for rank 1 only, and nobody asks for a look at rank 2
    assert FrameType.FAILED not in [message[0] for message in bench.take(RANKS[0])]
    assert FrameType.INSPECT not in [message[0] for message in bench.take(LAUNCHERS[1])]


def test_a_rank_that_is_stopped_before_it_joins_is_found_by_its_launcher(bench: StartsBench) -> None:
    bench.begin()
    for node in range(2):
        bench.send(LAUNCHERS[node], FrameType.STARTED, node, PIDS[node])
    bench.join_rank(0)
    began = bench.now
    bench.wait(2.0)
    assert bench.answer_looks(1, ProcessState.RUNNING) >= 1
    assert bench.answer_looks(0, ProcessState.RUNNING) == 0  # it has joined
    stopped_at = bench.now
    failures: list[tuple] = []
    while not failures and bench.now < began + 10:
        bench.wait(0.1)
        bench.answer_looks(1, ProcessState.STOPPED)
        for connection in LAUNCHERS:  # they are alive
            bench.send(connection, FrameType.HEARTBEAT, {})
        bench.send(RANKS[0], FrameType.HEARTBEAT, {})
        failures = [message for message in bench.take(RANKS[0]) if message[0] is FrameType.FAILED]
    assert bench.now - stopped_at <= 3.1
    [(_, _, kind, culprit, phase, _, text)] = failures
    assert (kind, culprit, phase) == (SILENCE, 1, "joining")
    assert text.startswith("rank 1/2 (pid 4712) was stopped (SIGSTOP?) before it joined: ")


def test_silent_launchers_and_silent_ranks_are_looked_at(bench: StartsBench) -> None:
    bench.begin()
    for rank in range(2):
        bench.join_rank(rank, pid=500 + rank)
    bench.wait(2.0)
    assert {(connection, pid) for connection, pid in bench.probes} >= {(10, 500), (11, 501)}
    for _ in range(2):
        bench.find(RANKS[1], ProcessState.STOPPED)
    [failure] = [message for message in bench.take(RANKS[0]) if message[0] is FrameType.FAILED]
    assert failure[3] == 1
    assert not [message for message in bench.take(LAUNCHERS[0]) if message[0] is FrameType.FAILED]
