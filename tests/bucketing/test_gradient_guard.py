"""The debug mode finds who writes to a gradient that gradsync has, names it, and lets pass what is allowed."""

from __future__ import annotations

import guard_checks as checks
import numpy as np
import pytest

import gradsync as gs
from gradsync.bucketing import guard
from gradsync.communicators.local import local_communicator
from places import GPU, SHM, STAND_IN, STAND_IN_STAGED, Place, always_on, on
from rank_processes import run_ranks, run_ranks_for_outcomes

TWO_RANKS = [*on(SHM, 2), *on(STAND_IN, 2), *on(STAND_IN_STAGED, 2), *on(GPU, 2)]
IN_BUCKETS = {"gradient_as_bucket_view": True}


@pytest.mark.parametrize("in_buckets", [False, True])
@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 2), *on(STAND_IN, 2), *always_on(STAND_IN_STAGED, 2)])
def test_a_write_before_the_reduction_is_told_with_its_place(place: Place, world_size: int, in_buckets: bool) -> None:
    if in_buckets and place.kit != "cupy" and place is not SHM:
        pytest.skip("gradients of the host do not live in buckets of a GPU")
    options = IN_BUCKETS if in_buckets else {}
    first, second = place.run(world_size, in_debug_mode, "change_before_reduction", place.kit, options)
    step, rank, parameter, where, text = first
    assert (step, rank, parameter) == (2, 0, "p1")
    assert where.startswith("guard_checks.py:")
    assert "the gradient of 'p1', handed over at " in text
    assert "was written to between its hand-over and the reduction of its bucket" in text
    assert second == (2, 0, "RankFailed")


def in_debug_mode(comm: gs.Communicator, check: str, kit: str, options: dict[str, object]) -> object:
    comm._use_debug_mode()
    return getattr(checks, check)(comm, kit, **options)


@pytest.mark.parametrize(("place", "world_size"), TWO_RANKS)
def test_a_sum_after_the_reduction_is_told(place: Place, world_size: int) -> None:
    for text in place.run(world_size, in_debug_mode, "add_after_reduction", place.kit, {}):
        assert "was written to between the reduction of its bucket and the end of the step" in text


@pytest.mark.parametrize(("place", "world_size"), TWO_RANKS)
def test_results_that_were_asked_for_are_the_programs(place: Place, world_size: int) -> None:
    place.run(world_size, in_debug_mode, "change_what_is_done", place.kit, {})


def train_in_each_way(comm: gs.Communicator, kit: str) -> None:
    for options in ({}, IN_BUCKETS, {"clip_norm": 1e9}, {"nonfinite": "raise"}):
        in_debug_mode(comm, "train_well", kit, options)


@pytest.mark.parametrize(("place", "world_size"), TWO_RANKS)
def test_what_is_allowed_passes(place: Place, world_size: int) -> None:
    place.run(world_size, train_in_each_way, place.kit)


@pytest.mark.parametrize("array", [np.zeros((4, 6))[:, ::2], np.zeros((3, 4), order="F"), np.zeros(5, np.complex64)])
def test_layouts_and_dtypes(array: np.ndarray) -> None:
    with local_communicator() as comm:
        comm._use_debug_mode()
        sync = gs.AllreduceCallback("sum", comm)
        older_view = array[...]  # the array itself is read-only meanwhile
        with pytest.raises(gs.GradientChanged), sync.backward():
            sync("p", array)
            older_view[1:2] += 1
        array[...] = 0
        with sync.backward():
            sync("p", array)


# -- The setting ---------------------------------------------------------------------------------------------------


def is_in_debug_mode(comm: gs.Communicator) -> bool:
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


def test_a_future_in_debug_mode_waits_as_any_other() -> None:
    with gs.init_process_group("local", debug=True) as comm:
        callback = gs.AllreduceCallback("mean", comm)
        future = callback("w", np.ones(3))
        for ask in (future.wait, future.result, future.numpy):
            with pytest.raises(gs.FutureNotReady, match="the gradient of 'w' is not ready"):
                ask()
        callback.flush()
        future.wait(timeout=1.0)
        assert (future.result() == 1.0).all()


def test_without_the_debug_mode_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard.GradientGuard, "take", None)
    with local_communicator() as comm:
        sync = gs.AllreduceCallback("sum", comm)
        gradient = np.ones(3)
        before = gradient[:]  # a view that the lock leaves writeable
        with sync.backward():
            sync("p", gradient)
            before += 1
