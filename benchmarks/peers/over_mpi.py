"""mpi4py's contenders on one rank, over MPICH or Open MPI: buffer calls, into existing arrays."""

from __future__ import annotations

from collections.abc import Callable

import mpi4py
import numpy as np
from mpi4py import MPI

from peers.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, RANKS, REDUCE_SCATTER, ROOT
from peers.contenders import (
    MPICH,
    MPICH_ARRAY,
    MPICH_FLAT,
    MPICH_PER_TENSOR,
    OPENMPI,
    OPENMPI_ARRAY,
    OPENMPI_FLAT,
    OPENMPI_PER_TENSOR,
)
from peers.operation import Operation
from peers.workload import Workload

_ARRAY, _PER_TENSOR, _FLAT = 0, 1, 2
_NAMES = {
    OPENMPI: (OPENMPI_ARRAY, OPENMPI_PER_TENSOR, OPENMPI_FLAT),
    MPICH: (MPICH_ARRAY, MPICH_PER_TENSOR, MPICH_FLAT),
}


class Mpi:
    """A rank of mpiexec.

    Args:
        system: OPENMPI or MPICH.
    """

    def __init__(self, system: str) -> None:
        self._names = _NAMES[system]
        self.rank = MPI.COMM_WORLD.Get_rank()
        self.barrier = MPI.COMM_WORLD.Barrier
        self.close = MPI.Finalize
        library = " ".join(MPI.Get_library_version().split(",")[0].split()).split(" MPICH Release")[0]
        self.versions = {"mpi4py": mpi4py.__version__, "library": library}

    def operations(self, workload: Workload, arrays: list[np.ndarray]) -> dict[str, Operation]:
        if not workload.is_list:
            (source,) = arrays
            target = workload.make_target(source)
            return {self._names[_ARRAY]: Operation(_on_one(workload.collective, source, target), lambda: [target])}
        if workload.collective == BROADCAST:
            return {self._names[_PER_TENSOR]: Operation(lambda: _start_of_each(arrays), lambda: arrays)}
        return {
            self._names[_PER_TENSOR]: Operation(lambda: _mean_of_each(arrays), lambda: arrays),
            self._names[_FLAT]: Operation(_mean_of_all(arrays), lambda: arrays),
        }


def _on_one(collective: str, source: np.ndarray, target: np.ndarray) -> Callable[[], object]:
    world = MPI.COMM_WORLD
    return {
        ALL_REDUCE: lambda: _sum(source),
        ALL_GATHER: lambda: world.Allgather(source, target),
        REDUCE_SCATTER: lambda: world.Reduce_scatter_block(source, target, op=MPI.SUM),
        BROADCAST: lambda: world.Bcast(source, ROOT),
        ALL_TO_ALL: lambda: world.Alltoall(source, target),
    }[collective]


def _start_of_each(arrays: list[np.ndarray]) -> None:
    for array in arrays:
        MPI.COMM_WORLD.Bcast(array, ROOT)


def _sum(array: np.ndarray) -> None:
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array, op=MPI.SUM)


def _mean(array: np.ndarray) -> None:
    _sum(array)
    np.multiply(array, np.float32(1 / RANKS), out=array)


def _mean_of_each(arrays: list[np.ndarray]) -> None:
    for array in arrays:
        _mean(array)


def _mean_of_all(arrays: list[np.ndarray]) -> object:
    """Returns what reduces all arrays as one, through a buffer that stays."""
    sources = [array.reshape(-1) for array in arrays]
    flat = np.zeros(sum(array.size for array in arrays), np.float32)
    parts = np.split(flat, np.cumsum([array.size for array in arrays])[:-1])

    def synchronise() -> None:
        np.concatenate(sources, out=flat)
        _mean(flat)
        for part, target in zip(parts, sources, strict=True):
            np.copyto(target, part)

    return synchronise
