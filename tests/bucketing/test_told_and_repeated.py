"""Errors that only some ranks have had, steps that fail in other hands, and what ranks repeat afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradsync as gs
from gradsync.communicators.local import local_communicator
from rank_processes import run_ranks

PARAMETERS = dict.fromkeys("ab", ((4,), "float64"))


def mismatch_in_a_subgroup(comm: Any) -> list[Any]:
    """Two of three ranks leave the block by a PlanMismatch that the third has not had."""
    sub = comm.new_group([0, 1])
    sync, results = gs.AllreduceCallback("sum", comm), []
    for step in range(3):
        try:
            with sync.backward():
                if step == 1 and comm.rank < 2:
                    sub.all_reduce(np.ones(3 + comm.rank))
                future = sync("w", np.full(4, 10.0**step))
            results.append(future.result()[0])
        except gs.GradsyncError as error:
            results.append(type(error).__name__)
    return results


def test_a_mismatch_of_some_ranks_is_a_failure_to_the_others() -> None:
    first, second, third = run_ranks(3, mismatch_in_a_subgroup)
    assert first == second == [3.0, "PlanMismatch", "CommunicatorClosed"]
    assert third == [3.0, "RankFailed", "CommunicatorClosed"]


def fail_in_a_step_that_flushes_itself(comm: Any) -> list[Any]:
    """On rank 0 the error comes out of the last gradient, on rank 1, which lacks one, out of the flush."""
    sync = gs.AllreduceCallback("sum", comm, parameters=PARAMETERS, missing="zero", nonfinite="raise")
    results: list[Any] = []
    for step in range(4):
        is_bad, first = False, None
        for name in "a" if comm.rank == 1 else "ab":
            try:
                future = sync(name, np.full(4, np.nan if step == 1 else 10.0**step))
                first = first or future
            except gs.NonFiniteGradient:
                is_bad = True
        try:
            sync.flush()
        except gs.NonFiniteGradient:
            is_bad = True
        results.append("bad" if is_bad or first is None else first.result()[0])
    return results


def test_a_failed_step_that_flushed_itself_is_not_flushed_again() -> None:
    assert run_ranks(2, fail_in_a_step_that_flushes_itself) == [[2.0, "bad", 200.0, 2000.0]] * 2


def hand_over_late(comm: Any) -> list[Any]:
    sync, results = gs.AllreduceCallback("sum", comm), []
    late: list[Any] = []
    for step in range(3):
        future = sync("a", np.full(4, 1.0))
        if step == 1:
            future.add_done_callback(lambda _: late.append(sync("late", np.full(4, 7.0))))
        sync("b", np.full(4, 100.0))
        try:
            sync.flush()
            results.append(future.result()[0])
        except gs.InvalidArgument:
            results.append("refused")
    return [*results, len(late)]


def test_a_done_callback_cannot_hand_over_into_a_step_that_is_being_flushed() -> None:
    assert run_ranks(2, hand_over_late) == [[2.0, "refused", 2.0, 0]] * 2


def change_in_place(comm: Any) -> list[float]:
    sync, gradient, results = gs.AllreduceCallback("sum", comm), np.zeros(4), []
    for step in range(6):
        if step == 4:
            gradient.dtype = np.int32  # type: ignore[misc]  # deprecated, and possible
        gradient[...] = -(comm.rank + 1)
        with sync.backward():
            future = sync("w", gradient)
        results.append(float(future.result()[-1]))
    return results


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_array_whose_dtype_changes_in_place_is_another_one() -> None:
    assert run_ranks(2, change_in_place) == [[-3.0] * 6] * 2


def test_parameters_that_are_none_are_refused() -> None:
    with pytest.raises(gs.InvalidArgument, match="parameters= names no parameter: name at least one"):
        gs.AllreduceCallback("sum", local_communicator(), parameters={})
