"""mpi4py on one rank: buffer calls over whatever MPI it has found, into arrays that are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpi4py
import numpy as np
from mpi4py import MPI

from gradsync.bench.collectives.cases import Case
from gradsync.bench.collectives.kinds import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    EXCHANGE,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    ROOT,
    SCATTER,
)
from gradsync.bench.collectives.operation import Buffers, NotOffered
from gradsync.bench.collectives.values import Array

_OPS = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
_HALF = ("float16", "bfloat16")


class Mpi:
    """See System: a rank of mpiexec."""

    backend = "mpi"

    def __init__(self) -> None:
        self._world = MPI.COMM_WORLD
        self.rank = self._world.Get_rank()
        self.barrier = self._world.Barrier
        self.close = MPI.Finalize
        library = " ".join(MPI.Get_library_version().strip("\0 \n").splitlines()[0].split())
        self.versions = {"mpi4py": mpi4py.__version__, "library": library, "numpy": np.__version__}

    def empty(self, elements: int, dtype: str) -> Array:
        if dtype in _HALF:
            raise NotOffered(f"mpi4py has no {dtype}")
        return np.zeros(elements, dtype)

    def fill(self, target: Array, values: Array | int) -> None:
        target[...] = values

    def to_host(self, array: Array) -> Array:
        return array

    def wait(self) -> None:
        """Nothing is queued."""

    def operation(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        world, source, target = self._world, buffers.source, buffers.target
        if case.op and case.op not in _OPS:
            raise NotOffered(f"MPI has no {case.op}")
        op = _OPS.get(case.op, MPI.SUM)
        is_same = source is target
        gathered = MPI.IN_PLACE if _is_part(source, target) else source
        dealt = MPI.IN_PLACE if _is_part(target, source) else target
        after, before = (self.rank + 1) % world.size, (self.rank - 1) % world.size
        calls: dict[str, Callable[[], Any]] = {
            ALL_REDUCE: lambda: world.Allreduce(MPI.IN_PLACE if is_same else source, target, op),
            REDUCE: lambda: world.Reduce(MPI.IN_PLACE if is_same and self.rank == ROOT else source, target, op, ROOT),
            BROADCAST: lambda: world.Bcast(source, ROOT),
            ALL_GATHER: lambda: world.Allgather(gathered, target),
            GATHER: lambda: world.Gather(gathered, target, ROOT),
            SCATTER: lambda: world.Scatter(source, dealt, ROOT),
            ALL_TO_ALL: lambda: world.Alltoall(MPI.IN_PLACE if is_same else source, target),
            EXCHANGE: lambda: world.Sendrecv(source, after, recvbuf=target, source=before),
            REDUCE_SCATTER: lambda: world.Reduce_scatter_block(source, target, op),
        }
        if case.collective == REDUCE_SCATTER and dealt is MPI.IN_PLACE:
            raise NotOffered("in place, MPI leaves the result at the beginning and not in the rank's own part")
        return calls[case.collective]


def _is_part(part: Array | None, whole: Array | None) -> bool:
    """Whether one array is a part of the other's memory, and not all of it."""
    return part is not None and whole is not None and part is not whole and np.shares_memory(part, whole)
