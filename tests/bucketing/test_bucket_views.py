"""Gradients that live inside the buckets."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import view_checks as checks

import gradsync as gs
from contract import IS_EVERYWHERE
from gradsync.communicators.local import local_communicator
from places import GPU, GPU_MIXED, SHM, STAND_IN, STAND_IN_MIXED, STAND_IN_SLOW, STAND_IN_STAGED, Place, always_on, on

PLACES = [
    *on(SHM, 1, 3, *([4] if IS_EVERYWHERE else [])),
    *on(STAND_IN, 1, 2),
    *always_on(STAND_IN_STAGED, 2),
    *on(STAND_IN_MIXED, 2),
    *on(GPU, 1, 2),
    *on(GPU_MIXED, 2),
]


@pytest.mark.parametrize(("place", "world_size"), [*PLACES, *on(STAND_IN_SLOW, 2)])
def test_gradients_live_in_buckets(place: Place, world_size: int) -> None:
    place.run(
        world_size, checks.live_in_buckets, place.kit, checks.CASES[1:2] if place is STAND_IN_SLOW else checks.CASES
    )


@pytest.mark.parametrize(
    ("place", "world_size"), [each for each in PLACES if IS_EVERYWHERE or each.values[0] is not STAND_IN_STAGED]
)
def test_arrays_that_are_made_again_refused_and_kept(place: Place, world_size: int) -> None:
    place.run(world_size, checks.all_of_it, place.kit)


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 1, 2), *on(STAND_IN, 2), *on(GPU, 2)])
def test_the_threshold_that_is_not_passed(place: Place, world_size: int) -> None:
    place.run(world_size, checks.thresholds, place.kit == "cupy")


# -- What needs no second process ---------------------------------------------------------------------------------


def test_buffers_need_the_option() -> None:
    callback = gs.AllreduceCallback("mean", local_communicator(), parameters={"a": ((2,), "float32")})
    with pytest.raises(gs.InvalidArgument, match="gradient_as_bucket_view=True"):
        callback.gradient_buffers()


def test_buffers_need_parameters_that_the_constructor_is_told() -> None:
    parameters = {"a": ((2,), "float32")}
    with pytest.raises(gs.InvalidArgument, match=r"gradient_as_bucket_view=True needs parameters=\.\.\."):
        gs.AllreduceCallback("mean", local_communicator(), gradient_as_bucket_view=True)
    callback = gs.AllreduceCallback("mean", local_communicator(), parameters=parameters, gradient_as_bucket_view=True)
    assert list(callback.gradient_buffers()) == ["a"]


def test_read_only_and_strided_gradients_are_copied() -> None:
    parameters = {"a": ((3,), "float64"), "b": ((2, 2), "float64"), "c": ((4,), "float64")}
    callback = gs.AllreduceCallback("mean", local_communicator(), parameters=parameters, gradient_as_bucket_view=True)
    buffers = callback.gradient_buffers()
    for _ in range(4):
        read_only = np.arange(3.0)
        read_only.setflags(write=False)
        gradients = {"a": read_only, "b": np.arange(8.0).reshape(2, 4)[:, ::2], "c": np.broadcast_to(np.ones(1), 4)}
        with callback.backward():
            futures = {name: callback(name, gradient) for name, gradient in gradients.items()}
        for name, future in futures.items():
            assert future.result() is buffers[name]
            np.testing.assert_array_equal(buffers[name], gradients[name])


def test_buckets_begin_at_cache_lines_and_gradients_lie_end_to_end() -> None:
    parameters = {f"p{i}": ((5,), "float32" if i % 3 else "float64") for i in range(9)}
    callback = gs.AllreduceCallback(
        "mean", local_communicator(), parameters=parameters, gradient_as_bucket_view=True, threshold_bytes=10**6
    )
    buffers = callback.gradient_buffers()
    for dtype in ("float32", "float64"):
        places = [checks.bounds_of(array) for array in buffers.values() if array.dtype == dtype]
        assert places[0][0] % 64 == 0
        assert all(end == begin for (_, end), (begin, _) in pairwise(places))
