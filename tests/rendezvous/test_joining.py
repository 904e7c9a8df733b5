"""Ranks that have not come while others wait, in the core with a virtual clock: who is looked at, who is condemned."""

from __future__ import annotations

import pytest
from core_bench import Bench
from hypothesis import given
from hypothesis import strategies as st

from gradsync.rendezvous.frames import SILENCE, FrameType, Inspected, Tick
from gradsync.rendezvous.liveness import INSPECT_EVERY_SECONDS, SILENT_AFTER_SECONDS, ProcessState, process_key

PID = 4711


def waiting_bench(world_size: int = 2) -> Bench:
    """All ranks but the last wait for it; its process is known."""
    bench = Bench(world_size)
    bench.start(world_size - 1, PID)
    for rank in range(world_size - 1):
        bench.join(rank, rank)
        bench.take(rank)
    return bench


def failures(bench: Bench, connection: int) -> list[tuple]:
    return [message[1:] for message in bench.take(connection) if message[0] is FrameType.FAILED]


def test_who_stands_still_before_it_joins_is_the_verdict_for_all_within_three_seconds() -> None:
    bench = waiting_bench(3)
    bench.wait(10)
    bench.states[PID] = ProcessState.STOPPED
    bench.wait(SILENT_AFTER_SECONDS - INSPECT_EVERY_SECONDS)
    assert failures(bench, 0) == []
    bench.wait(3.0 - SILENT_AFTER_SECONDS + INSPECT_EVERY_SECONDS)
    for rank in (0, 1):
        [(sequence, kind, culprit, phase, _, text)] = failures(bench, rank)
        assert (sequence, kind, culprit, phase) == (0, SILENCE, 2, "joining")
        assert text.startswith("rank 2/3 (pid 4711) was stopped (SIGSTOP?) before it joined: ")


def test_who_has_stood_still_from_the_beginning_is_found_once_somebody_waits() -> None:
    bench = Bench(2)
    bench.states[PID] = ProcessState.STOPPED
    bench.start(1, PID)
    bench.wait(60)
    assert bench.looks == []  # nobody needs it
    bench.join(0, 0)
    bench.wait(3)
    assert [failure[2] for failure in failures(bench, 0)] == [1]


def test_who_comes_later_after_a_verdict_is_told_too() -> None:
    bench = waiting_bench()
    bench.states[PID] = ProcessState.STOPPED
    bench.wait(3)
    bench.join(9, 1)  # continued too late
    assert [failure[2] for failure in failures(bench, 9)] == [1]


@pytest.mark.parametrize("state", [state for state in ProcessState if state is not ProcessState.STOPPED])
def test_who_may_still_come_is_waited_for(state: ProcessState) -> None:
    # One that has ended, too: whoever started it knows how, and tells.
    bench = waiting_bench()
    bench.states[PID] = state
    bench.wait(30)
    bench.join(1, 1)
    assert bench.take(0)[0][0] is FrameType.REPLY


@given(
    st.lists(st.tuples(st.floats(0.0, SILENT_AFTER_SECONDS - INSPECT_EVERY_SECONDS), st.floats(1.0, 5.0)), max_size=5)
)
def test_who_stands_still_for_a_moment_again_and_again_is_no_culprit(stops: list[tuple[float, float]]) -> None:
    bench = waiting_bench()
    for stopped_seconds, running_seconds in stops:
        bench.states[PID] = ProcessState.STOPPED
        bench.wait(stopped_seconds)
        bench.states[PID] = ProcessState.RUNNING
        bench.wait(running_seconds)
    assert failures(bench, 0) == []


def test_who_has_joined_is_looked_at_no_more_and_who_gives_up_anew() -> None:
    bench = Bench(3)
    bench.start(1, PID)
    bench.join(0, 0)
    joining = bench.join(1, 1)
    bench.wait(9.9)
    assert bench.looks == []
    bench.states[PID] = ProcessState.STOPPED
    bench.cancel(1, joining)
    bench.wait(1.5)  # it has given up, and what was before does not count
    bench.take(0)
    assert bench.looks
    assert failures(bench, 0) == []
    bench.wait(3)
    assert [failure[2] for failure in failures(bench, 0)] == [1]


def test_a_verdict_is_one_on_its_generation_alone() -> None:
    bench = waiting_bench()
    bench.states[PID] = ProcessState.STOPPED
    bench.wait(3)
    assert failures(bench, 0)
    bench.lose(0)
    bench.join(5, 0)
    bench.wait(1)  # it has still to be found anew
    bench.states[PID] = ProcessState.RUNNING
    bench.join(6, 1)
    assert [message[0] for message in bench.take(5)] == [FrameType.PULSE, FrameType.REPLY]


def test_nobody_is_looked_at_whose_process_is_not_known() -> None:
    bench = Bench(3)
    bench.join(0, 0)
    assert bench.core.next_deadline() == bench.now + 5.0  # for the next line of who is missing
    bench.start(1, PID)
    bench.wait(10)
    assert {(rank, pid) for _, rank, pid in bench.looks} == {(1, PID)}


def test_nothing_is_due_once_all_have_met_or_left() -> None:
    bench = waiting_bench()
    bench.wait(2)
    bench.lose(0)
    assert bench.core.next_deadline() is None
    bench.wait(10)
    before = len(bench.looks)
    bench.join(5, 0)
    bench.join(6, 1)
    bench.wait(10)
    assert len(bench.looks) == before
    bench._do(Inspected(process_key(1), ProcessState.STOPPED))  # an answer that comes late
    assert failures(bench, 5) == []


def test_a_server_that_was_itself_stopped_condemns_nobody() -> None:
    bench = waiting_bench()
    bench.wait(1)
    bench.states[PID] = ProcessState.STOPPED  # with the launcher: Ctrl-Z
    bench.now += 30.0
    bench._do(Tick())
    bench.wait(1)
    bench.states[PID] = ProcessState.RUNNING
    bench.wait(10)
    assert failures(bench, 0) == []
