"""The cases of the cross-check through gradsync, over shared memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from cross_check_cases import COLUMNS, Case, object_of, root_of

import gradsync as gs


class Gradsync:
    """A rank of `gradsync run`.

    Args:
        asynchronous: whether every collective goes through its asynchronous form.
    """

    def __init__(self, asynchronous: bool = False) -> None:
        self._communicator = gs.init_process_group("shm")
        self.rank, self.world_size = self._communicator.rank, self._communicator.world_size
        self._root = root_of(self.world_size)
        self._asynchronous = asynchronous
        self.close = gs.destroy_process_group

    def run(self, case: Case, source: np.ndarray) -> np.ndarray | None:
        """Returns what this rank gets of a case; None where it gets nothing."""
        is_bits = case.dtype == "bfloat16"
        result = getattr(self, f"_{case.collective}")(source.view(ml_dtypes.bfloat16) if is_bits else source, case)
        return result.view(np.uint16) if is_bits and result is not None else result

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        if not self._asynchronous:
            return getattr(self._communicator, method)(*args, **options)
        return getattr(self._communicator.asynchronous, method)(*args, **options).result()

    def _all_reduce(self, source: np.ndarray, case: Case) -> np.ndarray:
        return self._call("all_reduce", source, case.op)

    def _reduce(self, source: np.ndarray, case: Case) -> np.ndarray | None:
        return self._call("reduce", source, case.op, self._root)

    def _reduce_scatter(self, source: np.ndarray, case: Case) -> np.ndarray:
        sizes = case.sizes(self.world_size) if case.uneven else None
        return self._call("reduce_scatter", source, case.op, sizes=sizes)

    def _broadcast(self, source: np.ndarray, case: Case) -> np.ndarray:
        return self._call("broadcast", source, self._root)

    def _all_gather(self, source: np.ndarray, case: Case) -> np.ndarray:
        return self._call("all_gather", source, sizes=case.sizes(self.world_size) if case.uneven else None)

    def _gather(self, source: np.ndarray, case: Case) -> np.ndarray | None:
        sizes = case.sizes(self.world_size) if case.uneven else None
        return self._call("gather", source, self._root, sizes=sizes)

    def _scatter(self, source: np.ndarray, case: Case) -> np.ndarray:
        sizes = case.sizes(self.world_size)
        out = np.empty((sizes[self.rank], COLUMNS), source.dtype)
        given = source if self.rank == self._root else None
        return self._call("scatter", given, self._root, sizes=sizes if case.uneven else None, out=out)

    def _all_to_all(self, source: np.ndarray, case: Case) -> np.ndarray:
        send_sizes, recv_sizes = (of(self.rank, self.world_size) for of in (case.sizes_from, case.sizes_to))
        sizes = {"send_sizes": send_sizes, "recv_sizes": recv_sizes} if case.uneven else {}
        return self._call("all_to_all", source, **sizes)

    def _send_recv(self, source: np.ndarray, case: Case) -> np.ndarray | None:
        if self.rank == 0:
            self._call("send", source, self.world_size - 1)
        if self.rank == self.world_size - 1:
            return self._call("recv", np.empty_like(source), 0)
        return None

    def _exchange(self, source: np.ndarray, case: Case) -> np.ndarray:
        after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        return self._call("exchange", source, dest=after, out=np.empty_like(source), source=before)

    def _split(self, source: np.ndarray, case: Case) -> np.ndarray:
        with self._communicator.split(self.rank % 2, key=-self.rank) as group:
            return group.all_gather(source)

    def _objects_all_gather(self, source: np.ndarray, case: Case) -> Any:
        return self._communicator.objects.all_gather(object_of(self.rank))

    def _objects_gather(self, source: np.ndarray, case: Case) -> Any:
        return self._communicator.objects.gather(object_of(self.rank), self._root)

    def _objects_broadcast(self, source: np.ndarray, case: Case) -> Any:
        return self._communicator.objects.broadcast(object_of(self.rank), self._root)

    def _objects_scatter(self, source: np.ndarray, case: Case) -> Any:
        given = [object_of(rank) for rank in range(self.world_size)] if self.rank == self._root else None
        return self._communicator.objects.scatter(given, self._root)
