"""The cases of the cross-check through mpi4py's own collectives, over whatever MPI it finds."""

from __future__ import annotations

from typing import Any

import numpy as np
from cross_check_cases import COLUMNS, Case, object_of, root_of
from mpi4py import MPI

OPERATORS = {"sum": MPI.SUM, "mean": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
OPERATORS_OF_BOOL = {"min": MPI.LAND, "max": MPI.LOR}


class Mpi:
    """A rank of mpiexec."""

    def __init__(self) -> None:
        self._world = MPI.COMM_WORLD
        self.rank, self.world_size = self._world.Get_rank(), self._world.Get_size()
        self._root = root_of(self.world_size)
        self.close = MPI.Finalize

    def run(self, case: Case, source: np.ndarray) -> np.ndarray | None:
        """Returns what this rank gets of a case; None where it gets nothing."""
        result = getattr(self, f"_{case.collective}")(source, case)
        # MPI has no mean: it is its sum, divided.
        return result / result.dtype.type(self.world_size) if case.op == "mean" and result is not None else result

    def _operator(self, case: Case) -> MPI.Op:
        return (OPERATORS_OF_BOOL if case.dtype == "bool" else OPERATORS)[case.op]

    def _counts(self, sizes: list[int]) -> list[int]:
        return [rows * COLUMNS for rows in sizes]

    def _empty(self, source: np.ndarray, rows: int) -> np.ndarray:
        return np.empty((rows, COLUMNS), source.dtype)

    def _all_reduce(self, source: np.ndarray, case: Case) -> np.ndarray:
        target = np.empty_like(source)
        self._world.Allreduce(source, target, self._operator(case))
        return target

    def _reduce(self, source: np.ndarray, case: Case) -> np.ndarray | None:
        target = np.empty_like(source) if self.rank == self._root else None
        self._world.Reduce(source, target, self._operator(case), self._root)
        return target

    def _reduce_scatter(self, source: np.ndarray, case: Case) -> np.ndarray:
        sizes = case.sizes(self.world_size)
        target = self._empty(source, sizes[self.rank])
        self._world.Reduce_scatter(source, target, self._counts(sizes), self._operator(case))
        return target

    def _broadcast(self, source: np.ndarray, case: Case) -> np.ndarray:
        self._world.Bcast(source, self._root)
        return source

    def _all_gather(self, source: np.ndarray, case: Case) -> np.ndarray:
        sizes = case.sizes(self.world_size)
        target = self._empty(source, sum(sizes))
        if case.uneven:
            self._world.Allgatherv(source, [target, self._counts(sizes)])
        else:
            self._world.Allgather(source, target)
        return target

    def _gather(self, source: np.ndarray, case: Case) -> np.ndarray | None:
        sizes = case.sizes(self.world_size)
        target = self._empty(source, sum(sizes)) if self.rank == self._root else None
        if case.uneven:
            self._world.Gatherv(source, None if target is None else [target, self._counts(sizes)], self._root)
        else:
            self._world.Gather(source, target, self._root)
        return target

    def _scatter(self, source: np.ndarray, case: Case) -> np.ndarray:
        sizes = case.sizes(self.world_size)
        target = self._empty(source, sizes[self.rank])
        if case.uneven:
            given = [source, self._counts(sizes)] if self.rank == self._root else None
            self._world.Scatterv(given, target, self._root)
        else:
            self._world.Scatter(source if self.rank == self._root else None, target, self._root)
        return target

    def _all_to_all(self, source: np.ndarray, case: Case) -> np.ndarray:
        send_sizes, recv_sizes = (of(self.rank, self.world_size) for of in (case.sizes_from, case.sizes_to))
        target = self._empty(source, sum(recv_sizes))
        if case.uneven:
            self._world.Alltoallv([source, self._counts(send_sizes)], [target, self._counts(recv_sizes)])
        else:
            self._world.Alltoall(source, target)
        return target

    def _send_recv(self, source: np.ndarray, case: Case) -> np.ndarray | None:
        if self.rank == 0:
            self._world.Send(source, self.world_size - 1)
        if self.rank < self.world_size - 1:
            return None
        target = np.empty_like(source)
        self._world.Recv(target, 0)
        return target

    def _exchange(self, source: np.ndarray, case: Case) -> np.ndarray:
        target = np.empty_like(source)
        after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        self._world.Sendrecv(source, after, recvbuf=target, source=before)
        return target

    def _split(self, source: np.ndarray, case: Case) -> np.ndarray:
        group = self._world.Split(self.rank % 2, -self.rank)
        target = self._empty(source, len(source) * group.Get_size())
        group.Allgather(source, target)
        group.Free()
        return target

    def _objects_all_gather(self, source: np.ndarray, case: Case) -> Any:
        return self._world.allgather(object_of(self.rank))

    def _objects_gather(self, source: np.ndarray, case: Case) -> Any:
        return self._world.gather(object_of(self.rank), self._root)

    def _objects_broadcast(self, source: np.ndarray, case: Case) -> Any:
        return self._world.bcast(object_of(self.rank), self._root)

    def _objects_scatter(self, source: np.ndarray, case: Case) -> Any:
        given = [object_of(rank) for rank in range(self.world_size)] if self.rank == self._root else None
        return self._world.scatter(given, self._root)
