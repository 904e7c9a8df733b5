"""Collectives on one array, beside gloo and mpi4py: each gives its result in an array that exists."""

from __future__ import annotations

import numpy as np
import pytest

import gradsync as gs
import models
import systems
from compare import Compare, contenders
from teams import Step

SIZES = {"256 B": 2**8, "4 KB": 2**12, "64 KB": 2**16, "1 MB": 2**20, "16 MB": 2**24, "64 MB": 2**26}
ROUND_BYTES, MOST_CALLS = 2**22, 100


SMALL = 2**8  # with --benchmark-disable


def calls_of(size: int) -> int:
    """Returns how many calls make a round: one of a few microseconds would say more about the barrier before it."""
    return max(1, min(MOST_CALLS, ROUND_BYTES // size))


def step(contender: str, collective: str, size: int) -> Step:
    """Returns a call. `size` is what a rank gives, in bytes; of reduce_scatter what it gets.

    All ranks give their rank + 1.
    """
    comm = systems.comm()
    ranks, elements = comm.world_size, size // 4
    given = np.full(elements * (ranks if collective == "reduce_scatter" else 1), comm.rank + 1, np.float32)
    taken = np.empty(elements * (ranks if collective == "all_gather" else 1), np.float32)
    total = ranks * (ranks + 1) / 2
    expected = {
        "all_reduce": np.full(elements, total),
        "reduce_scatter": np.full(elements, total),
        "broadcast": np.ones(elements),
        "all_gather": np.repeat(np.arange(1.0, ranks + 1), elements),
        "all_to_all": np.repeat(np.arange(1.0, ranks + 1), elements // ranks),
    }[collective]
    if contender == "mpi4py":
        call = _of_mpi(collective, given, taken)
    elif contender == "gloo":
        call = _of_gloo(collective, given, taken)
    else:
        call = _of_gradsync(collective, given, taken)
    for _ in range(3):
        call()
        np.testing.assert_array_equal(given if collective == "broadcast" else taken, expected)
    return call


def _of_gradsync(collective: str, given: np.ndarray, taken: np.ndarray) -> Step:
    comm = systems.comm()
    if collective == "broadcast":
        return lambda: _none(comm.broadcast(given))
    function = getattr(comm, collective)
    return lambda: _none(function(given, out=taken))


def _of_mpi(collective: str, given: np.ndarray, taken: np.ndarray) -> Step:
    world = systems.mpi().COMM_WORLD
    return {
        "all_reduce": lambda: world.Allreduce(given, taken),
        "reduce_scatter": lambda: world.Reduce_scatter_block(given, taken),
        "broadcast": lambda: world.Bcast(given),
        "all_gather": lambda: world.Allgather(given, taken),
        "all_to_all": lambda: world.Alltoall(given, taken),
    }[collective]


def _of_gloo(collective: str, given: np.ndarray, taken: np.ndarray) -> Step:
    dist = systems.gloo()
    import torch

    source, target = torch.from_numpy(given), torch.from_numpy(taken)

    def all_reduce() -> None:  # it has only the one in place
        target.copy_(source)
        dist.all_reduce(target)

    return {
        "all_reduce": all_reduce,
        "reduce_scatter": lambda: _none(dist.reduce_scatter_single(target, source)),
        "broadcast": lambda: _none(dist.broadcast(source, 0)),
        "all_gather": lambda: _none(dist.all_gather_single(target, source)),
        "all_to_all": lambda: _none(dist.all_to_all_single(target, source)),
    }[collective]


def _none(_result: object) -> None:
    """A step that returns something has timed itself."""


def measure(compare: Compare, name: str, collective: str, size: int) -> None:
    compare(name, step, collective, SMALL if compare.disabled else size, calls=calls_of(size))


@pytest.mark.parametrize("size", SIZES)
@contenders("gradsync", "gloo", "mpi4py")
def test_all_reduce(compare: Compare, size: str) -> None:
    measure(compare, f"all_reduce: {size}", "all_reduce", SIZES[size])


@pytest.mark.parametrize("size", ["64 KB", "1 MB", "16 MB"])
@pytest.mark.parametrize("collective", ["broadcast", "all_gather", "reduce_scatter", "all_to_all"])
@contenders("gradsync", "gloo", "mpi4py")
def test_collective(compare: Compare, collective: str, size: str) -> None:
    measure(compare, f"collective: {collective} {size}", collective, SIZES[size])


def start_of_a_model(contender: str, gradients: models.Gradients) -> Step:
    """Returns what gives all ranks the parameters of rank 0."""
    comm = systems.comm()
    arrays = [np.full(shape, comm.rank, dtype) for dtype, shape in gradients]
    if contender == "mpi4py":
        world = systems.mpi().COMM_WORLD

        def call() -> None:
            for array in arrays:
                world.Bcast(array)

    else:

        def call() -> None:
            gs.bcast_list_(arrays, root=0, group=comm)

    call()
    if any(array.any() for array in arrays):
        raise AssertionError("not all ranks have the values of rank 0")
    return call


@contenders("gradsync", "mpi4py")
def test_start_of_a_model(compare: Compare, model: str) -> None:
    gradients = models.gradients_of(model, few=compare.disabled)
    compare(f"parameters from rank 0: {models.name_of(model)}", start_of_a_model, gradients, rounds=8)
