"""gradsync's contenders, and the local copy, on one rank."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import gradsync as gs
from memory_mode import MemoryProbe
from peers.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER, ROOT
from peers.contenders import GRADSYNC, LOCAL_COPY
from peers.operation import Operation
from peers.workload import Workload


class Gradsync:
    """A rank of `gradsync run`, default settings."""

    def __init__(self) -> None:
        self._communicator = gs.init_process_group(backend="shm")
        self.rank = self._communicator.rank
        self.barrier = self._communicator.barrier
        self.close = gs.destroy_process_group
        self.versions = {"gradsync": gs.__version__}

    def operations(self, workload: Workload, arrays: list[np.ndarray]) -> dict[str, Operation]:
        if not workload.is_list:
            (source,) = arrays
            target = workload.make_target(source)
            return {GRADSYNC: Operation(self._on_one(workload.collective, source, target), lambda: [target])}
        if workload.collective == BROADCAST:
            return {GRADSYNC: Operation(lambda: gs.bcast_list_(arrays, ROOT), lambda: arrays)}
        return {GRADSYNC: _through_callback(arrays), LOCAL_COPY: _local_copy(arrays)}

    def _on_one(self, collective: str, source: np.ndarray, target: np.ndarray) -> Callable[[], object]:
        communicator = self._communicator
        return {
            ALL_REDUCE: lambda: communicator.all_reduce(source, "sum"),
            ALL_GATHER: lambda: communicator.all_gather(source, out=target),
            REDUCE_SCATTER: lambda: communicator.reduce_scatter(source, "sum", out=target),
            BROADCAST: lambda: communicator.broadcast(source, ROOT),
            ALL_TO_ALL: lambda: communicator.all_to_all(source, out=target),
        }[collective]

    def memory_probe(self, path: str) -> MemoryProbe:
        return MemoryProbe(path, self.rank, self.barrier)


def _through_callback(gradients: list[np.ndarray]) -> Operation:
    callback = gs.AllreduceCallback("mean")

    def synchronise() -> None:
        with callback.backward():
            futures = [callback(index, gradient) for index, gradient in enumerate(gradients)]
        for future in futures:
            future.result()

    return Operation(synchronise, lambda: gradients)


def _local_copy(gradients: list[np.ndarray]) -> Operation:
    destinations = [np.full_like(gradient, -1) for gradient in gradients]  # touches every page

    def copy() -> None:
        for source, destination in zip(gradients, destinations, strict=True):
            np.copyto(destination, source)

    return Operation(copy, None)
