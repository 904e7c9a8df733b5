"""AllreduceCallback.join between processes: ranks that run out of batches, die, or do not know what to do."""

from __future__ import annotations

import join_checks as checks
import numpy as np
import pytest

import gradsync as gs
from gradsync.communicators.local import local_communicator
from places import GPU, SHM, STAND_IN, STAND_IN_MIXED, STAND_IN_STAGED, Place, always_on, on

THREE_RANKS = [*on(SHM, 3), *always_on(STAND_IN, 3), *on(GPU, 3)]


@pytest.mark.parametrize(
    ("place", "batches"),
    [
        pytest.param(place, batches, id=f"{place.name}, {batches}", marks=place.marks)
        for place, batches in [
            (SHM, (3,)),
            (SHM, (2, 5, 0)),
            (SHM, (0, 4)),
            (SHM, (0, 0)),
            (STAND_IN, (2, 5, 0)),
            (STAND_IN_STAGED, (3, 1)),
            (STAND_IN_MIXED, (1, 3)),
            (GPU, (2, 5, 0)),
            (GPU, (3, 1)),
        ]
    ],
)
def test_the_mean_counts_those_that_have_a_batch(place: Place, batches: tuple[int, ...]) -> None:
    last_ranks = place.run(len(batches), checks.run_out, place.kit, batches)
    assert last_ranks == [[batches.index(max(batches))] * 4] * len(batches)


def test_uneven_steps_prepare_the_memory_of_buckets_once() -> None:
    """Once for the mean over all ranks, and once for the mean over those that still have batches."""
    assert SHM.run(3, checks.repeat_uneven_steps) == [2] * 3


@pytest.mark.parametrize(("place", "world_size"), THREE_RANKS)
def test_a_rank_that_knows_no_gradients_is_told_to_all(place: Place, world_size: int) -> None:
    told = place.run(world_size, checks.leave_without_a_batch, place.kit)
    assert told == [told[0]] * world_size
    assert "join(parameters=...)" in told[0]


def test_a_rank_repeats_the_last_step_that_did_not_fail() -> None:
    assert SHM.run(2, checks.leave_after_a_failed_step, SHM.kit) == [[1.0, 1.0], []]


@pytest.mark.parametrize(("place", "world_size"), on(SHM, 2))
def test_a_rank_repeats_a_shorter_step_of_known_arrays(place: Place, world_size: int) -> None:
    assert place.run(world_size, checks.leave_after_a_shorter_step, place.kit) == [1.0, 1.5]


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 2), *on(STAND_IN, 2), *on(GPU, 2)])
def test_another_order_is_refused(place: Place, world_size: int) -> None:
    told = place.run(world_size, checks.know_another_order, place.kit)
    assert told == [told[0]] * world_size


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 2), *on(STAND_IN, 2)])
def test_a_rank_that_did_not_join_is_told(place: Place, world_size: int) -> None:
    place.run(world_size, checks.join_on_some_ranks_only, place.kit)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 3), *always_on(STAND_IN, 3)])
def test_an_exception_reaches_those_that_stand_in(place: Place, world_size: int, inside: bool) -> None:
    told = place.run(world_size, checks.raise_in_the_loop, place.kit, inside)
    assert told == ["told", "raised", "told"]


@pytest.mark.parametrize(("place", "world_size"), THREE_RANKS)
def test_a_rank_that_dies_is_named_by_those_that_stand_in(place: Place, world_size: int) -> None:
    outcomes = place.outcomes(world_size, checks.die_in_the_loop, place.kit)
    assert outcomes.pop(1).exit_code == -9
    for survivor in outcomes:
        assert isinstance(survivor.error, gs.RankFailed), survivor.traceback_text
        assert survivor.error.rank == 1


@pytest.mark.parametrize(("place", "world_size"), THREE_RANKS)
def test_all_can_take_the_newest_parameters(place: Place, world_size: int) -> None:
    told = place.run(world_size, checks.take_the_newest_parameters, place.kit)
    # Steps 0 and 1: the mean over ranks 0 and 1 of 1 + rank + step; steps 2, 3 and 4: rank 1's alone.
    assert told == [np.full(4, -(1.5 + 2.5 + 4 + 5 + 6)).tobytes()] * world_size


@pytest.mark.parametrize(("place", "world_size"), THREE_RANKS)
def test_a_group_can_join(place: Place, world_size: int) -> None:
    told = place.run(world_size, checks.join_in_a_group, place.kit)
    assert told == [[2 + 4 + 5] * 2, None, [2 + 4 + 5] * 2]  # the mean of 1 and 3 first


# -- What needs no second process ---------------------------------------------------------------------------------


def test_misuse_is_told() -> None:
    callback = gs.AllreduceCallback("mean", local_communicator())
    callback("w", np.ones(2))
    with (
        pytest.raises(gs.InvalidArgument, match=r"join\(\) is not possible before handed-over gradients are reduced"),
        callback.join(),
    ):
        pass
    callback.flush()
    with pytest.raises(gs.InvalidArgument, match=r"the end of join\(\) is not possible before"), callback.join():
        future = callback("w", np.ones(2))
    with pytest.raises(gs.GradientCancelled, match=r"join\(\) ended with"):
        future.result()
    with (
        callback.join(),
        pytest.raises(
            gs.InvalidArgument, match=r"^rank 0/1: join\(\) is not possible inside another join.*: put one join"
        ),
        callback.join(),
    ):
        pass
    with callback.join(), callback.backward():
        future = callback("w", np.ones(2))
    assert (future.result() == 1).all()


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        (7, "got int"),
        (np.ones(2), "got ndarray"),
        ({"w": "float32"}, "parameter 'w'"),
        ({"w": ((2,), "float31")}, "parameter 'w'.*float31"),
        ({"w": (2, "float32")}, "parameter 'w'"),
        ({"w": ((2,),)}, "parameter 'w'"),
        ([1.0], "join, parameter #0"),
    ],
)
def test_parameters_that_cannot_be_are_told_at_once(parameters: object, match: str) -> None:
    callback = gs.AllreduceCallback("mean", local_communicator())
    with pytest.raises(gs.InvalidArgument, match=match), callback.join(parameters):
        pass
    with pytest.raises(gs.UnsupportedDtype, match="int32"), callback.join({"w": ((2,), "int32")}):
        pass
    with callback.join({}):  # what was refused has left no trace
        pass
