"""Collectives on one array, beside gloo and mpi4py: each gives its result in an array that exists."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import gradsync as gs
import models
import systems
from compare import Compare, contenders
from systems import Step

SIZES = {"256 B": 2**8, "4 KB": 2**12, "64 KB": 2**16, "1 MB": 2**20, "16 MB": 2**24, "64 MB": 2**26}
ROUND_BYTES, MOST_CALLS = 2**22, 100


@pytest.mark.parametrize("size", SIZES)
@contenders("gradsync", "gloo", "mpi4py")
def test_all_reduce(compare: Compare, size: str) -> None:
    measure(compare, f"all_reduce: {size}", "all_reduce", SIZES[size])


@pytest.mark.parametrize("size", ["4 KB", "64 KB", "1 MB", "16 MB"])
@pytest.mark.parametrize("ranks", [4, 8])
@contenders("gradsync", "mpi4py")
def test_all_reduce_of_more_ranks(compare: Compare, ranks: int, size: str) -> None:
    measure(compare, f"{ranks} ranks: all_reduce {size}", "all_reduce", SIZES[size], ranks)


@pytest.mark.parametrize("size", ["64 KB", "1 MB", "16 MB"])
@pytest.mark.parametrize("collective", ["broadcast", "all_gather", "reduce_scatter", "all_to_all"])
@contenders("gradsync", "gloo", "mpi4py")
def test_collective(compare: Compare, collective: str, size: str) -> None:
    measure(compare, f"collective: {collective} {size}", collective, SIZES[size])


@contenders("gradsync", "mpi4py")
def test_start_of_a_model(compare: Compare, model: str) -> None:
    gradients = models.gradients_of(model, few=compare.disabled)
    compare(f"parameters from rank 0: {models.name_of(model)}", parameters_from_rank_0, gradients, rounds=8)


def measure(compare: Compare, name: str, collective: str, size: int, ranks: int | None = None) -> None:
    # A round of a few microseconds would say more about the barrier before it.
    calls = max(1, min(MOST_CALLS, ROUND_BYTES // size))
    compare(name, step, collective, SIZES["256 B"] if compare.disabled else size, calls=calls, ranks=ranks)


def step(contender: str, collective: str, size: int) -> Step:
    """Returns a call. `size` is what a rank gives, in bytes; of reduce_scatter what it gets.

    All ranks give their rank + 1.
    """
    comm = systems.comm()
    ranks, elements = comm.world_size, size // 4
    elements -= elements % ranks if collective == "all_to_all" else 0
    given = np.full(elements * (ranks if collective == "reduce_scatter" else 1), comm.rank + 1, np.float32)
    taken = np.empty(elements * (ranks if collective == "all_gather" else 1), np.float32)
    total = ranks * (ranks + 1) / 2
    expected = {
        "all_reduce": np.full(elements, total),
        "reduce_scatter": np.full(elements, total),
        "broadcast": np.ones(elements),
        "all_gather": np.repeat(np.arange(1.0, ranks + 1), elements),
        "all_to_all": np.repeat(np.arange(1.0, ranks + 1), elements // ranks),
    }
    of = {"mpi4py": of_mpi, "gloo": of_gloo}.get(contender, of_gradsync)
    call = of(collective, given, taken)
    for _ in range(3):
        given.fill(comm.rank + 1)
        taken.fill(np.nan)
        call()
        np.testing.assert_array_equal(given if collective == "broadcast" else taken, expected[collective])
    return call


def of_gradsync(collective: str, given: np.ndarray, taken: np.ndarray) -> Step:
    comm = systems.comm()
    if collective == "broadcast":
        return partial(comm.broadcast, given)
    return partial(getattr(comm, collective), given, out=taken)


def of_mpi(collective: str, given: np.ndarray, taken: np.ndarray) -> Step:
    world = systems.mpi().COMM_WORLD
    return {
        "all_reduce": partial(world.Allreduce, given, taken),
        "reduce_scatter": partial(world.Reduce_scatter_block, given, taken),
        "broadcast": partial(world.Bcast, given),
        "all_gather": partial(world.Allgather, given, taken),
        "all_to_all": partial(world.Alltoall, given, taken),
    }[collective]


def of_gloo(collective: str, given: np.ndarray, taken: np.ndarray) -> Step:
    dist = systems.gloo()
    import torch

    source, target = torch.from_numpy(given), torch.from_numpy(taken)

    def all_reduce() -> None:  # it has only the one in place, so a copy is part of it
        target.copy_(source)
        dist.all_reduce(target)

    return {
        "all_reduce": all_reduce,
        "reduce_scatter": partial(dist.reduce_scatter_single, target, source),
        "broadcast": partial(dist.broadcast, source, 0),
        "all_gather": partial(dist.all_gather_single, target, source),
        "all_to_all": partial(dist.all_to_all_single, target, source),
    }[collective]


def parameters_from_rank_0(contender: str, gradients: models.Gradients) -> Step:
    comm = systems.comm()
    arrays = [np.full(shape, comm.rank, dtype) for dtype, shape in gradients]

    def call() -> None:
        if contender == "mpi4py":
            for array in arrays:
                systems.mpi().COMM_WORLD.Bcast(array)
        else:
            gs.bcast_list_(arrays, root=0, group=comm)

    call()
    if any(array.any() for array in arrays):
        raise AssertionError("not all ranks have the values of rank 0")
    return call
