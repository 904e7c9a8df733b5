"""Steps whose arrays come again: as right as the first, and as those that are another in the middle."""

from __future__ import annotations

import operator
import warnings
from typing import Any

import numpy as np
import pytest
import steady_checks as checks
from naive_reference import THRESHOLDS

import gradsync as gs
from contract import IS_EVERYWHERE
from gradsync.communicators.local import local_communicator
from places import GPU, SHM, STAND_IN, STAND_IN_MIXED, STAND_IN_STAGED, Place, always_on, on

FEW = [*on(SHM, 2), *on(STAND_IN, 2), *on(GPU, 2)]


@pytest.mark.parametrize(
    ("place", "world_size"),
    [*on(SHM, 1, 3), *on(STAND_IN, 2), *always_on(STAND_IN_STAGED, 1), *always_on(STAND_IN_MIXED, 2), *on(GPU, 1, 2)],
)
def test_a_step_in_the_middle_is_another_one(place: Place, world_size: int) -> None:
    thresholds = THRESHOLDS if place is SHM and IS_EVERYWHERE else THRESHOLDS[1 : 2 + (place is SHM and world_size > 1)]
    # To save time: where arrays of the host are among NCCL's, every second way, as they are to be told from the others.
    is_half = place in (STAND_IN_STAGED, STAND_IN_MIXED) and not IS_EVERYWHERE
    place.run(world_size, checks.deviate, place.kit, thresholds, checks.DEVIATIONS[:: 2 if is_half else 1])


@pytest.mark.parametrize(("place", "world_size"), [*FEW, *always_on(STAND_IN_STAGED, 2)])
def test_foreign_arrays(place: Place, world_size: int) -> None:
    place.run(world_size, checks.reduce_foreign_arrays, place.kit)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0, "nonfinite": "skip"}], ids=["plain", "watched"])
@pytest.mark.parametrize(("place", "world_size"), FEW)
def test_no_array_is_held_for_longer_than_it_may_come_again(
    place: Place, world_size: int, options: dict[str, Any]
) -> None:
    place.run(world_size, checks.hold_no_memory, place.kit, options)


# -- What needs no second process ---------------------------------------------------------------------------------


def steady_callback(arrays: list[np.ndarray[Any, Any]], **options: Any) -> gs.AllreduceCallback:
    """Returns a callback to which arrays for the parameters 0, 1, 2 have come three times running."""
    callback = gs.AllreduceCallback("sum", local_communicator(), **options)
    for _ in range(3):
        for at, array in enumerate(arrays):
            callback(at, array)
        callback.flush()
    return callback


@pytest.mark.parametrize("threshold_bytes", [1, 10**6])
@pytest.mark.parametrize("known", [0, 1, 2])
def test_what_is_refused_is_refused_after_gradients_that_came_again(threshold_bytes: int, known: int) -> None:
    base = np.ones(32)
    arrays = [base[8 * at : 8 * at + 8] for at in range(3)]
    callback = steady_callback(arrays, threshold_bytes=threshold_bytes)
    for at in range(known + 1):
        callback(at, arrays[at])
    for array in (arrays[known], np.ones(8), arrays[min(known + 1, 2)]):
        with pytest.raises(gs.InvalidArgument, match=f"{known} was handed over twice before a flush"):
            callback(known, array)
    for array in (arrays[known], arrays[0], base[4:12], base[known * 8 :][:8]):
        with pytest.raises(gs.InvalidArgument, match=r"gradient of 7 shares memory with the gradient of \d"):
            callback(7, array)
    for at in range(known + 1, 3):  # what was refused has left no trace
        callback(at, arrays[at])
    callback.flush()
    for at, array in enumerate(arrays):
        callback(at, array)
    callback.flush()
    assert callback.statistics.gradients == 3 * 5


def test_what_came_again_is_refused_after_what_is_new() -> None:
    base = np.ones(32)
    arrays = [base[8 * at : 8 * at + 8] for at in range(3)]
    for new, again, text in [
        ((0, base[4:12]), (1, arrays[1]), "gradient of 1 shares memory with the gradient of 0"),
        ((1, np.ones(8)), (1, arrays[1]), "1 was handed over twice"),
        ((9, arrays[1][:1]), (1, arrays[1]), "gradient of 1 shares memory with the gradient of 9"),
    ]:
        callback = steady_callback(arrays)
        callback(*new)
        for _ in range(2):
            with pytest.raises(gs.InvalidArgument, match=text):
                callback(*again)
        future = callback(2, arrays[2])
        callback.flush()
        assert future.result() is arrays[2]
        parameters = dict.fromkeys(range(3), ((8,), "float64"))
        fixed = steady_callback(arrays, parameters=parameters)
        fixed(0, base[4:12])
        with pytest.raises(gs.InvalidArgument, match="gradient of 1 shares memory with the gradient of 0"):
            fixed(1, arrays[1])
        fixed(1, np.ones(8))
        fixed(2, arrays[2])


def test_an_array_that_came_again_comes_for_another_parameter() -> None:
    arrays = [np.full(4, float(at)) for at in range(3)]
    callback = steady_callback(arrays)
    futures = [callback(at, arrays[(at + 1) % 3]) for at in range(3)]
    callback.flush()
    assert all(future.result() is arrays[(at + 1) % 3] for at, future in enumerate(futures))
    callback(0, arrays[0])
    with pytest.raises(gs.InvalidArgument, match="gradient of 1 shares memory with the gradient of 0"):
        callback(1, arrays[0])
    callback.flush()


def test_a_dtype_is_refused_each_time() -> None:
    callback = gs.AllreduceCallback("mean", local_communicator())
    integers = np.ones(3, np.int64)
    for _ in range(4):
        callback("w", np.ones(3))
        with pytest.raises(gs.UnsupportedDtype, match="gradient of 'i'"):
            callback("i", integers)
        callback.flush()


def test_an_empty_step_leaves_what_is_known() -> None:
    """Seen in what is kept: another way would lead to the same numbers."""
    gradients = [np.ones(5) for _ in range(4)]
    with local_communicator() as comm:
        callback = gs.AllreduceCallback("mean", comm)
        reducer = callback._step.reducer

        def step() -> tuple[Any, ...]:
            for number, gradient in enumerate(gradients):
                callback(number, gradient)
            callback.flush()
            return [agreement for _, agreement in reducer.events._known], reducer._last.get(0)

        for _ in range(3):
            known = step()
        callback.flush()
        again = step()
    assert all(map(operator.is_, known[0], again[0]))
    assert again[1] is known[1]
    assert known[1] is not None


@pytest.mark.parametrize(("name", "value"), [("shape", (2, 3)), ("dtype", np.dtype(np.int32))])
def test_an_array_that_was_changed_in_place_is_looked_at_anew(name: str, value: Any) -> None:
    gradient = np.zeros(6, np.float32)
    with local_communicator() as comm:
        sync = gs.AllreduceCallback("sum", comm)
        for number in range(4):
            if number == 3:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # newer NumPys advise against it
                    setattr(gradient, name, value)
            sync("p", gradient)
            sync.flush()
        [(spec, *_)] = sync._step.planner.assignments
    assert (spec.shape, spec.dtype) == (gradient.shape, str(gradient.dtype))
