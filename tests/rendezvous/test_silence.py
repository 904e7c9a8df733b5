"""Stopped ranks and silent peers, in the core with a virtual clock: who is looked at, who is condemned, who is not."""

from __future__ import annotations

import pytest
from core_bench import SERVER, Bench
from hypothesis import given
from hypothesis import strategies as st

from gradsync.rendezvous.frames import SILENCE, FrameType
from gradsync.rendezvous.liveness import HEARTBEAT_SECONDS, Judgement, Peer, ProcessState

FATAL = [state for state in ProcessState if state.is_fatal]
HARMLESS = [state for state in ProcessState if not state.is_fatal]


class BeatingBench(Bench):
    """Ranks 0 to world_size - 1 of one generation, with pids from 1000, on the connections of their numbers."""

    def __init__(self, world_size: int, machine: str = SERVER) -> None:
        super().__init__(world_size)
        self.join_all(first_pid=1000, machine=machine)

    def live(self, seconds: float, ranks: list[int], states: dict[int, ProcessState] | None = None) -> None:
        """Lets time pass in which these ranks beat, and probes are answered."""
        end = self.now + seconds
        while self.now < end:
            for rank in ranks:
                self.send(rank, FrameType.HEARTBEAT, {})
            step_end = min(self.now + HEARTBEAT_SECONDS, end)
            while (due := self.core.next_deadline()) is not None and due <= step_end:
                self.wait(max(due - self.now, 0.0))
                for connection, _ in self.take_probes():
                    self.find(connection, (states or {})[connection])
            self.wait(step_end - self.now)

    def take_probes(self) -> list[tuple[int, int | None]]:
        probes, self.probes = self.probes, []
        return probes

    def failures(self, rank: int) -> list[tuple]:
        return [message[1:] for message in self.take(rank) if message[0] is FrameType.FAILED]


def test_ranks_that_beat_are_answered_and_never_looked_at() -> None:
    bench = BeatingBench(2)
    bench.live(60, [0, 1])
    assert bench.take(0) == [(FrameType.PULSE,)] * 120
    assert (bench.probes, bench.notices) == ([], [])


@pytest.mark.parametrize("state", FATAL)
def test_stopped_rank_is_the_verdict_for_all_within_three_seconds(state: ProcessState) -> None:
    bench = BeatingBench(3)
    bench.live(10, [0, 1, 2])
    bench.inbox.clear()
    bench.live(2.5, [0, 1], {2: state})
    [failure] = bench.failures(0)
    assert failure[:-1] == (0, SILENCE, 2, "running", ())
    assert failure[-1].startswith(f"rank 2/3 (pid 1002) {state.value}: ")
    assert bench.failures(1) == bench.failures(2) == [failure]
    # Nobody is listened for in a generation that has failed.
    assert bench.core.next_deadline() is None


def test_a_stopped_rank_that_nobody_needs_any_more_is_told_of_to_the_operator() -> None:
    """The others have left; only the launcher waits for it, and would wait without a word."""
    bench = BeatingBench(2)
    bench.send(0, FrameType.LEAVE, "", None, 0)
    bench.live(2.5, [], {1: ProcessState.STOPPED})
    [notice] = bench.notices
    assert notice.startswith("rank 1/2 (pid 1001) was stopped (SIGSTOP?): ")
    bench.live(60, [])
    assert len(bench.notices) == 1


def test_once_is_not_enough() -> None:
    bench = BeatingBench(2)
    bench.live(1.6, [0], {1: ProcessState.STOPPED})
    bench.live(0.5, [0], {1: ProcessState.RUNNING})
    bench.live(0.5, [0], {1: ProcessState.STOPPED})
    bench.send(1, FrameType.HEARTBEAT, {})  # it goes on
    bench.live(1.6, [0], {1: ProcessState.STOPPED})
    assert bench.failures(0) == []


@pytest.mark.parametrize("state", HARMLESS)
def test_busy_rank_is_told_of_once_and_never_condemned(state: ProcessState) -> None:
    bench = BeatingBench(2)
    bench.live(60, [0], {1: state})
    [notice] = bench.notices
    who = "rank 1/2 (pid 1001)"
    assert notice.startswith(f"{who} has sent nothing for 5 s, but {state.value} (")
    bench.send(1, FrameType.DELETE, "k")  # any message is a sign of life
    assert bench.notices[1:] == ["rank 1/2 (pid 1001) responds again"]
    bench.live(10, [0, 1])
    assert len(bench.notices) == 2
    assert bench.failures(0) == []


def test_silent_rank_gets_something_that_its_machine_must_acknowledge() -> None:
    bench = BeatingBench(1, machine="another machine")
    bench.take(0)
    bench.wait(2)
    assert bench.take_probes() == [(0, None)] * 2  # nothing is known of its processes
    assert bench.take(0) == [(FrameType.PULSE,)] * 2


def test_rank_on_another_machine_is_named_with_its_host() -> None:
    bench = BeatingBench(2, machine="another machine")
    bench.lose(1)
    assert "rank 1/2 (pid 1001 on node7) died" in bench.failures(0)[0][-1]


def test_all_clocks_restart_when_the_server_itself_did_not_run() -> None:
    bench = BeatingBench(2)
    bench.live(10, [0, 1])
    bench.now += 30  # the machine was suspended: no tick came
    bench.send(0, FrameType.HEARTBEAT, {})
    bench.live(1.4, [0])
    assert bench.take_probes() == []
    bench.live(2, [0], {1: ProcessState.STOPPED})  # a full silence counts again
    assert len(bench.failures(0)) == 1


def test_rank_that_has_left_or_never_said_who_it_is_is_not_listened_for() -> None:
    bench = BeatingBench(2)
    bench.send(1, FrameType.LEAVE, "", None, 0)
    bench.lose(1)
    bench.live(10, [0])
    other = Bench(2)
    other.join_all()
    other.wait(100)
    assert bench.probes == other.probes == []


def test_stopped_rank_fails_those_who_wait_to_join() -> None:
    bench = Bench(2)
    bench.join(0, 0, pid=1000)
    bench.take(0)
    bench.wait(1.5)
    bench.find(0, ProcessState.STOPPED)
    bench.wait(0.5)
    bench.find(0, ProcessState.STOPPED)
    bench.join(1, 1)
    assert bench.take(1)[0][1:5] == (bench._sequence, SILENCE, 0, "joining")


def test_probe_of_a_rank_that_is_gone_meanwhile_means_nothing() -> None:
    bench = BeatingBench(2)
    bench.wait(2)
    bench.lose(1)
    bench.inbox.clear()
    for _ in range(2):
        bench.find(1, ProcessState.GONE)
        bench.find(0, ProcessState.GONE)
    assert bench.inbox == {}


steps = st.lists(st.tuples(st.floats(0.0, 3.0), st.sampled_from([None, *ProcessState])), max_size=60)


@given(steps)
def test_only_two_fatal_states_after_a_full_silence_are_lost(steps: list[tuple[float, ProcessState | None]]) -> None:
    """Against a model that keeps the whole history."""
    now, last_seen_at, history = 100.0, 100.0, []
    silence = Peer(now)
    for pause, state in steps:
        now += pause
        if state is None:
            silence.note_alive(now)
            last_seen_at, history = now, []
            continue
        judgement = silence.judge(now, state)
        if now < last_seen_at + 1.5:
            assert judgement is Judgement.NONE
            continue
        history.append(state)
        assert (judgement is Judgement.LOST) == (len(history) > 1 and all(f.is_fatal for f in history[-2:]))
        if judgement is Judgement.SLOW:
            assert now >= last_seen_at + 5
