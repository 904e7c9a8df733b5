"""AllreduceCallback between processes, on every backend: right sums, few collectives, and no rank left waiting."""

from __future__ import annotations

import gc
import threading

import callback_checks as checks
import numpy as np
import pytest

import gradsync as gs
from contract import IS_EVERYWHERE
from gradsync.bucketing import take_forgotten
from gradsync.communicators.agreement import agreement_on
from gradsync.communicators.local import local_communicator
from places import (
    GPU,
    GPU_MIXED,
    GPU_STAGED,
    SHM,
    STAND_IN,
    STAND_IN_MIXED,
    STAND_IN_SLOW,
    STAND_IN_STAGED,
    Place,
    always_on,
    on,
)

TWO_RANKS = [*on(SHM, 2), *on(STAND_IN, 2), *on(GPU, 2)]
EVERYWHERE = [
    *on(SHM, 1, 2, 3, *([4] if IS_EVERYWHERE else [])),
    *on(STAND_IN, 1, 2, 3, 4),
    *always_on(STAND_IN_SLOW, 2),
    *always_on(STAND_IN_STAGED, 2),
    *always_on(STAND_IN_MIXED, 2),
    *on(GPU, 1, 2, 4),
    *on(GPU_STAGED, 2),
    *on(GPU_MIXED, 1, 2, 4),
]
ONE_AND_TWO_RANKS = [*on(SHM, 1, 2), *on(STAND_IN, 1, 2), *on(STAND_IN_STAGED, 2), *on(GPU, 1, 2)]


@pytest.mark.parametrize(("place", "world_size"), EVERYWHERE)
def test_awkward_gradients(place: Place, world_size: int) -> None:
    place.run(world_size, checks.reduce_awkward_gradients, place.kit)


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 1, 2), *on(STAND_IN, 1, 2), *on(GPU, 1, 2)])
def test_number_of_all_reduces(place: Place, world_size: int) -> None:
    place.run(world_size, checks.count_all_reduces, place.kit)


@pytest.mark.parametrize(("place", "world_size"), [*ONE_AND_TWO_RANKS, *on(STAND_IN_SLOW, 2), *on(STAND_IN_MIXED, 2)])
def test_futures_resolve_per_bucket(place: Place, world_size: int) -> None:
    place.run(world_size, checks.resolve_per_bucket, place.kit)


@pytest.mark.parametrize(("place", "world_size"), TWO_RANKS)
def test_parameters_are_named_by_anything(place: Place, world_size: int) -> None:
    place.run(world_size, checks.name_parameters_by_anything, place.kit)


@pytest.mark.parametrize(
    ("place", "world_size"),
    [*on(SHM, 3), *on(STAND_IN, 2, 4), *on(STAND_IN_SLOW, 3), *on(STAND_IN_MIXED, 2), *on(GPU, 2, 4)],
)
def test_disagreement_is_told_on_every_rank(place: Place, world_size: int) -> None:
    by_rank = place.run(world_size, checks.disagree, place.kit)
    assert all(told == by_rank[0] for told in by_rank), "the ranks tell different stories"
    for how, _, text in by_rank[0]:
        assert how not in ("order", "shape", "name") or "p5" in text


@pytest.mark.parametrize(
    ("place", "where"),
    [
        *((SHM, where) for where in (0, 3, 5)),
        *((STAND_IN, where) for where in (0, 3)),
        (STAND_IN_STAGED, 3),
        *(pytest.param(GPU, where, marks=GPU.marks) for where in (2, 3)),
    ],
    ids=lambda value: value.name if isinstance(value, Place) else None,
)
def test_an_exception_on_one_rank_reaches_the_others(place: Place, where: int) -> None:
    assert place.run(3, checks.raise_in_the_middle, place.kit, where) == ["told", "raised", "told"]


@pytest.mark.parametrize(
    ("place", "world_size"), [*on(SHM, 3), *always_on(STAND_IN, 3), *on(STAND_IN_STAGED, 2), *on(GPU, 2)]
)
def test_a_killed_rank_is_named_on_the_others(place: Place, world_size: int) -> None:
    outcomes = place.outcomes(world_size, checks.die_in_the_middle, place.kit)
    assert outcomes.pop(1).exit_code == -9
    for survivor in outcomes:
        assert isinstance(survivor.error, gs.RankFailed), survivor.traceback_text
        assert survivor.error.rank == 1


@pytest.mark.parametrize(("place", "world_size"), [*TWO_RANKS, *always_on(STAND_IN_SLOW, 2)])
def test_temporaries_are_no_overlap(place: Place, world_size: int) -> None:
    place.run(world_size, checks.reduce_temporaries, place.kit)


@pytest.mark.parametrize(("place", "world_size"), TWO_RANKS)
def test_the_first_difference_is_named_in_a_large_bucket(place: Place, world_size: int) -> None:
    for text in place.run(world_size, checks.differ_late_in_a_large_bucket, place.kit):
        assert "first difference, line 4401:" in text
        assert "number 4400': float64[2, 3]" in text
        assert "number 4400': float64[3, 2]" in text


# -- What needs no second process ---------------------------------------------------------------------------------


def test_bad_arguments_are_told_at_once() -> None:
    comm = local_communicator()
    for method in ("average", "min", "", None, 3):
        with pytest.raises(gs.InvalidArgument, match="sum"):
            gs.AllreduceCallback(method, comm)  # type: ignore[arg-type]
    with pytest.raises(gs.InvalidArgument, match="unknown backend 'gloo'"):
        gs.AllreduceCallback("mean", comm, "gloo")
    with pytest.raises(gs.InvalidArgument, match="Communicator"):
        gs.AllreduceCallback("mean", "world")  # type: ignore[arg-type]
    with pytest.raises(gs.InvalidArgument, match="needs backend 'nccl'"):
        gs.AllreduceCallback("mean", comm, "nccl")("w", np.ones(1))
    with pytest.raises(gs.InvalidArgument, match="init_process_group"):
        gs.AllreduceCallback("mean")("w", np.ones(1))
    with pytest.raises(gs.InvalidArgument, match="threshold_bytes"):
        gs.AllreduceCallback("mean", comm, threshold_bytes=0)


def test_gradients_without_a_mean_are_refused_at_once() -> None:
    callback = gs.AllreduceCallback("mean", local_communicator())
    with pytest.raises(gs.UnsupportedDtype, match="gradient of 'w'.* mean is not defined for dtype int32.*astype"):
        callback("w", np.ones(3, np.int32))
    with pytest.raises(gs.InvalidArgument, match="^rank 0/1: the gradient of 'w' needs .*got a list: make"):
        callback("w", [1.0, 2.0])
    callback("w", np.ones(3))  # what was refused has left no trace
    callback.flush()
    assert callback.statistics.gradients == 1


def test_the_same_parameter_twice_is_an_error() -> None:
    callback = gs.AllreduceCallback("mean", local_communicator())
    weight = np.zeros(3)
    for param in ("w", weight):
        callback(param, np.ones(3))
        with pytest.raises(gs.InvalidArgument, match="twice before a flush"):
            callback(param, np.ones(3))
    callback.flush()
    callback("w", np.ones(3))
    callback.flush()


def test_a_gradient_may_have_another_shape_and_dtype_in_the_next_step() -> None:
    callback = gs.AllreduceCallback("mean", local_communicator())
    for shape, dtype in [((3,), "f4"), ((3,), "f4"), ((2, 2), "f4"), ((2, 2), "f8"), ((3,), "f4")]:
        future = callback("w", np.ones(shape, dtype))
        callback.flush()
        assert (future.result().shape, future.result().dtype) == (shape, dtype)


def test_an_exception_cancels_the_futures_of_one_rank() -> None:
    comm = local_communicator()
    callback = gs.AllreduceCallback("mean", comm)
    with pytest.raises(KeyError), callback.backward():
        future = callback("w", np.ones(3))
        raise KeyError("x")
    with pytest.raises(gs.GradientCancelled, match="KeyError"):
        future.result()
    with callback.backward():
        future = callback("w", np.ones(3))
    assert (future.result() == 1).all()


def test_a_forgotten_flush_is_known() -> None:
    callback = gs.AllreduceCallback("mean", local_communicator())
    callback("w", np.ones(3))
    del callback
    gc.collect()
    (text,) = take_forgotten()
    assert "1 gradient was handed over and never reduced" in text
    callback = gs.AllreduceCallback("mean", local_communicator())
    with callback.backward():
        callback("w", np.ones(3))
    del callback
    gc.collect()
    assert take_forgotten() == []


def test_alias() -> None:
    assert gs.make_allreduce_cb is gs.AllreduceCallback


def test_a_second_thread_is_told() -> None:
    comm = local_communicator()
    errors = []

    def use() -> None:
        try:
            comm.barrier()
        except gs.InvalidArgument as error:
            errors.append(str(error))

    with comm._lifetime.collective("all_reduce", agreement_on("all_reduce", (), None, "")):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join(30)
    assert "one thread at a time" in errors[0]


def test_gradients_that_share_memory_are_refused() -> None:
    base = np.ones(1000)
    square = np.ones((4, 4))
    read_only = np.broadcast_to(np.float64(1), (8,))
    pairs = [(base, base), (base[:600], base[500:]), (square, square.T), (base[::2], base[10:13]), (base, base[3:4])]
    for first, second in pairs:
        callback = gs.AllreduceCallback("mean", local_communicator(), threshold_bytes=16)
        callback("a", first)
        with pytest.raises(gs.InvalidArgument, match="gradient of 'b' shares memory with the gradient of 'a'"):
            callback("b", second)
        callback.flush()
    fine = [(base[:500], base[500:]), (base[::2], base[1::2]), (read_only, read_only), (base[:0], base)]
    for first, second in fine:
        callback = gs.AllreduceCallback("mean", local_communicator())
        for _ in range(2):
            callback("a", first)
            callback("b", second)
            callback.flush()


@pytest.mark.parametrize(("place", "world_size"), ONE_AND_TWO_RANKS)
def test_numbers_are_gradients(place: Place, world_size: int) -> None:
    place.run(world_size, checks.hand_over_numbers, place.kit)


def test_a_callback_shows_what_it_is() -> None:
    assert repr(gs.AllreduceCallback("SUM")) == '<AllreduceCallback("sum") without a group: 0 steps>'
    with local_communicator() as comm:
        sync = gs.AllreduceCallback(group=comm, name="critic")
        sync("p", np.ones(3))
        sync.flush()
        sync("p", np.ones(3))
        shown = "<AllreduceCallback(\"mean\", name='critic') on rank 0/1: 1 steps, 1 gradients of the next step>"
        assert repr(sync) == shown
        sync.flush()


def test_a_sum_is_advised_where_it_would_be_taken() -> None:
    with local_communicator() as comm:
        sync = gs.AllreduceCallback("mean", comm)
        with pytest.raises(gs.UnsupportedDtype, match=r"AllreduceCallback\(\"sum\"\) where a sum is meant"):
            sync("p", np.ones(3, int))
        with pytest.raises(gs.UnsupportedDtype) as caught:
            sync("p", np.ones(3, "M8[s]"))
        assert "AllreduceCallback" not in str(caught.value)
