"""gradsync's contenders, and the local copy, on one rank."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import gradsync as gs
from peers.callback_settings import SETTINGS, living_in_buckets, through
from peers.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER, ROOT
from peers.contenders import BY_HAND, GRADSYNC, IN_BUCKETS, LOCAL_COPY
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
        plain = through(gs.AllreduceCallback("mean"), arrays)
        if workload.settings:
            return {GRADSYNC: plain, **{name: SETTINGS[name](arrays) for name in workload.settings}}
        return {
            GRADSYNC: plain,
            IN_BUCKETS: living_in_buckets(arrays),
            BY_HAND: Operation(self._by_hand(arrays), lambda: arrays),
            LOCAL_COPY: _local_copy(arrays),
        }

    def _on_one(self, collective: str, source: np.ndarray, target: np.ndarray) -> Callable[[], object]:
        communicator = self._communicator
        return {
            ALL_REDUCE: lambda: communicator.all_reduce(source, "sum"),
            ALL_GATHER: lambda: communicator.all_gather(source, out=target),
            REDUCE_SCATTER: lambda: communicator.reduce_scatter(source, "sum", out=target),
            BROADCAST: lambda: communicator.broadcast(source, ROOT),
            ALL_TO_ALL: lambda: communicator.all_to_all(source, out=target),
        }[collective]

    def _by_hand(self, gradients: list[np.ndarray]) -> Callable[[], object]:
        """Returns the step without buckets, as one writes it by hand: concatenate, all_reduce, split."""
        ends = np.cumsum([gradient.size for gradient in gradients])[:-1]

        def synchronise() -> None:
            flat = np.concatenate([gradient.reshape(-1) for gradient in gradients])
            self._communicator.all_reduce(flat, "mean")
            for gradient, part in zip(gradients, np.split(flat, ends), strict=True):
                np.copyto(gradient, part.reshape(gradient.shape))

        return synchronise


def _local_copy(gradients: list[np.ndarray]) -> Operation:
    destinations = [np.full_like(gradient, -1) for gradient in gradients]  # touches every page

    def copy() -> None:
        for source, destination in zip(gradients, destinations, strict=True):
            np.copyto(destination, source)

    return Operation(copy, None)
