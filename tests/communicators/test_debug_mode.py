"""The debug mode: the ranks compare every collective before data move, also where they usually predict."""

from __future__ import annotations

import numpy as np
import pytest

import gradsync as gs
from places import STAND_IN
from rank_processes import run_ranks, run_ranks_for_outcomes


def is_in_debug_mode(comm: gs.Communicator) -> bool:
    half = comm.split(color=comm.rank % 2)
    assert half
    assert half._debug == comm._debug
    return comm._debug


def test_it_is_asked_for_by_argument_or_variable() -> None:
    assert run_ranks(2, is_in_debug_mode) == [False, False]
    assert run_ranks(2, is_in_debug_mode, debug=True) == [True, True]
    assert run_ranks(2, is_in_debug_mode, environment={"GRADSYNC_DEBUG": "1"}) == [True, True]
    assert run_ranks(2, is_in_debug_mode, debug=False, environment={"GRADSYNC_DEBUG": "1"}) == [False, False]


def test_a_word_is_no_setting() -> None:
    for outcome in run_ranks_for_outcomes(1, is_in_debug_mode, environment={"GRADSYNC_DEBUG": "yes"}):
        assert isinstance(outcome.error, gs.InvalidArgument)


def repeat_itself(comm: gs.Communicator) -> int:
    asked = 0
    agree = comm._backend.client.agree

    def counting(*args: object, **options: object) -> object:
        nonlocal asked
        asked += 1
        return agree(*args, **options)

    comm._backend.client.agree = counting
    for _ in range(30):
        comm.all_reduce(np.ones(3, np.float32))
        comm.barrier()
    return asked


def test_over_nccl_every_collective_is_asked_about() -> None:
    usual = STAND_IN.run(2, repeat_itself)
    asked = STAND_IN.run(2, repeat_itself, debug=True)
    assert max(usual) < 20
    assert asked == [60, 60]


def leave_what_was_repeated(comm: gs.Communicator) -> tuple[bool, str]:
    for _ in range(10):
        comm.all_reduce(np.ones(3, np.float32))
    with pytest.raises(gs.PlanMismatch) as caught:
        comm.all_reduce(np.ones(3 + comm.rank, np.float32))
    value = np.ones(3, np.float32)
    if not caught.value.broken:
        comm.all_reduce(value)
    return caught.value.broken, str(value.tolist())


def test_over_nccl_a_rank_that_leaves_the_plan_is_found_before_data_move() -> None:
    """Without the debug mode a rank that predicts may have launched its own by then, and the communicator is broken."""
    assert STAND_IN.run(2, leave_what_was_repeated, debug=True) == [(False, "[2.0, 2.0, 2.0]")] * 2
