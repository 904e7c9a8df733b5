"""Parameters that nobody has broadcast: a warning before the first step, once, on one rank, and none that is false."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from places import SHM, STAND_IN, STAND_IN_STAGED, Place, always_on, on


class Heard(logging.Handler):
    """Collects warnings of the library."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("gradsync").addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("gradsync").removeHandler(self)


def arrays_of(kit: str, **values: Any) -> dict[str, Any]:
    if kit == "cupy":
        import cupy

        return {name: cupy.asarray(value) for name, value in values.items()}
    return values


def train(parameters: Any, names: Any, *, grads: Any = None) -> list[str]:
    """Returns the warnings of two steps, in which each gradient is as large as its parameter."""
    with Heard() as lines:
        sync = gs.AllreduceCallback("sum", parameters=parameters, threshold_bytes=8)
        n = gs.WORLD.world_size
        xp = np if grads is None else grads

        for _ in range(2):
            with sync.backward():
                futures = [sync(name, xp.full(array.shape, 1.0, array.dtype)) for name, array in names]
            assert all((future.numpy() == n).all() for future in futures)
    return lines


def forget_the_broadcast(comm: Any, kit: str) -> None:
    last = comm.rank == comm.world_size - 1
    xp: Any = np
    if kit == "cupy":
        import cupy as xp
    weights = arrays_of(
        kit,
        same=np.arange(3.0),
        empty=np.zeros((0, 2)),
        nan=np.array([np.nan, -0.0]),
        w=np.full(4, float(last), np.float32),
        zero=np.array([-0.0 if last else 0.0]),
    )
    for by_name in (True, False):
        named = list(weights.items()) if by_name else [(array, array) for array in weights.values()]
        parameters = weights if by_name else list(weights.values())
        lines = train(parameters, named, grads=xp)
        if comm.rank:
            assert lines == []
            continue
        (line,) = lines
        name = "'w'" if by_name else "#3"
        assert (
            f"that differs is {name}: rank {comm.world_size - 1} has other values than rank 0; 2 of 5 arrays differ"
            in line
        )
        assert "call gs.bcast_list_(arrays, root=0)" in line
    comm.barrier()
    gs.bcast_list_(list(weights.values()))
    assert train(weights, list(weights.items()), grads=xp) == []


PLACES = [*on(SHM, 2, 3), *on(STAND_IN, 2), *always_on(STAND_IN_STAGED, 2)]


@pytest.mark.parametrize(("place", "n"), PLACES)
def test_the_first_that_differs_is_named_once(place: Place, n: int) -> None:
    place.run(n, forget_the_broadcast, place.kit)


def compare_nothing(comm: Any) -> None:
    rank = comm.rank
    mine = {"w": np.full(4, float(rank)), "b": np.full(2, float(rank))}
    shapes = {name: (array.shape, array.dtype) for name, array in mine.items()}
    read_only = {name: array.copy() for name, array in mine.items()}
    for array in read_only.values():
        array.setflags(write=False)
    named = list(mine.items())
    # Shapes on one rank, or on all; arrays that the program cannot have broadcast in place.
    for parameters in (shapes if rank else mine, shapes, read_only):
        assert train(parameters, named) == []
    # Gradients, which differ: they are no parameters.
    with Heard() as lines:
        sync = gs.AllreduceCallback("sum", parameters=mine)
        for _ in range(2):
            with sync.backward():
                for name, array in named:
                    sync(name, array)
    assert lines == []
    # None before the first gradient, and then no rank's values but the first step's.
    fresh = {name: np.zeros(array.shape) for name, array in named}
    with Heard() as lines:
        sync = gs.AllreduceCallback("sum", parameters=fresh)
        for step in range(2):
            with sync.backward():
                for name, array in named:
                    sync(name, np.ones(array.shape))
            fresh["w"] += rank * step
        with sync.backward():
            for name, array in named:
                sync(name, np.ones(array.shape))
    assert lines == []


@pytest.mark.parametrize(("place", "n"), [*on(SHM, 2, 3), *on(STAND_IN_STAGED, 2)])
def test_what_cannot_be_known_is_not_warned_of(place: Place, n: int) -> None:
    place.run(n, compare_nothing)


def miss_some(comm: Any, is_view: bool) -> list[str]:
    """Rank 0 has no gradient at all in the first step: its first is made of zeros, in the flush."""
    weights = {"w": np.full(4, float(comm.rank)), "b": np.zeros(2)}
    with Heard() as lines:
        sync = gs.AllreduceCallback("sum", parameters=weights, missing="zero", gradient_as_bucket_view=is_view)
        with sync.backward():
            if comm.rank:
                sync("b", np.ones(2))
    assert sync.filled["w"].tolist() == [0.0] * 4
    return lines


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize(("place", "n"), [*on(SHM, 2, 3), *on(STAND_IN_STAGED, 2)])
def test_a_rank_without_gradients_compares_too(place: Place, n: int, is_view: bool) -> None:
    first, *others = place.run(n, miss_some, is_view)
    assert len(first) == 1
    assert "that differs is 'w': rank 1 has other values than rank 0; 1 of 2 arrays differ" in first[0]
    assert others == [[]] * (n - 1)


def test_a_world_of_one_compares_nothing() -> None:
    with gs.init_process_group("local"):
        weights = {"w": np.ones(2)}
        assert train(weights, list(weights.items())) == []
