"""Lifetime: one collective at a time, and an end that Ctrl-C cannot prevent, whenever it comes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from gradsync.communicators.agreement import agreement_on
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.lifetime import Lifetime
from gradsync.communicators.local import LocalBackend, local_communicator
from rank_processes import run_ranks, run_ranks_for_outcomes

WAIT = 30.0


class _Noting(LocalBackend):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def announce_close(self) -> None:
        self.heard.append("closed")

    def announce_abort(self, reason: str, culprit: int | None) -> None:
        self.heard.append(f"aborted: {reason}")

    def release(self) -> None:
        self.heard.append("released")


class Noting(Communicator):
    """Notes what the other ranks would hear, and its release."""

    def __init__(self) -> None:
        backend = _Noting()
        super().__init__(backend)
        self.heard = backend.heard


def close(comm: Noting) -> None:
    comm.close()


def interrupted_between(comm: Any) -> str:
    """Rank 0 is interrupted at the very end of a collective, catches that, and closes; what does rank 1 see?"""
    group = comm.new_group([0, 1])
    if comm.rank == 0:

        def interrupt(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code is Lifetime.__exit__.__code__:
                sys.settrace(None)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            sys.settrace(interrupt)
            group.all_reduce(np.ones(3))
        group.close()
        return ""
    group.all_reduce(np.ones(3))
    with pytest.raises(gs.RankFailed) as caught:
        group.barrier()
    return str(caught.value)


def test_the_others_are_told_of_an_interrupted_end() -> None:
    assert "in all_reduce: it was interrupted" in run_ranks(2, interrupted_between)[1]


# -- Ends from outside -----------------------------------------------------------------------------------------------


def closed_by_another_thread(comm: Any) -> str:
    """Rank 1 waits for rank 2, which waits for rank 1 to be told: that rank 0 has left the collective midway."""
    pair = comm.new_group([1, 2])
    if comm.rank == 0:
        begun = comm.recorder.begun

        def close() -> None:
            deadline = time.monotonic() + WAIT
            while comm.recorder.begun == begun and time.monotonic() < deadline:
                time.sleep(0.001)
            comm.close()

        thread = threading.Thread(target=close)
        thread.start()
    if comm.rank == 2:
        pair.barrier()
    error = expect_failure(comm.barrier)
    if comm.rank == 1:
        pair.barrier()
    return error


def expect_failure(call: Callable[[], Any]) -> str:
    with pytest.raises(gs.RankFailed) as caught:
        call()
    return str(caught.value)


def test_a_close_in_the_middle_of_a_collective_is_told_at_once() -> None:
    outcomes = run_ranks_for_outcomes(3, closed_by_another_thread, collective_timeout_seconds=WAIT)
    texts = [outcome.returned() for outcome in outcomes]
    assert "closed or aborted during a collective" in texts[0]
    assert all("rank 0 aborted: in barrier" in text for text in texts[1:]), texts


def test_one_that_was_closed_in_order_is_not_aborted_afterwards() -> None:
    comm = Noting()
    comm.close()
    comm.abort("late")
    assert comm.heard == ["closed", "released"]


def test_later_calls_name_the_first_line_of_why_it_was_aborted() -> None:
    comm = local_communicator()
    comm.abort("it failed\nwith a report of all ranks")
    with pytest.raises(gs.CommunicatorClosed, match=r"cannot be used: it was aborted: it failed$"):
        comm.barrier()


def test_who_comes_again_from_within_is_not_taken_for_another_thread() -> None:
    """A signal's handler, for one, runs on top of the collective."""
    comm = Noting()
    inside = comm._lifetime.collective("all_reduce", agreement_on("all_reduce", (), None, ""))
    with inside, pytest.raises(gs.InvalidArgument, match="while this same thread .* is running all_reduce"):
        comm.barrier()
    comm.barrier()
    assert comm.heard == []


# -- Failures that a call has raised already -------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "is_same"), [(1, True), (2, False)])
def test_closing_raises_a_failure_unless_a_call_has_raised_it_in_other_words(rank: int, is_same: bool) -> None:
    comm = local_communicator()
    comm._lifetime.raised.add(gs.RankFailed("rank 0/4: rank 1 died", rank=1))
    comm._lifetime.fail(gs.RankFailed(f"rank 0/2 of group 'a': rank {rank} died", rank=rank))
    if is_same:
        comm.close()
    else:
        with pytest.raises(gs.RankFailed, match="rank 2 died"):
            comm.close()
