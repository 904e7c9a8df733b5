"""One rank: the communicator of all, with arrays where its backend wants them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import gradsync as gs
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
from gradsync.bench.devices import array_module
from gradsync.errors import UnsupportedDtype
from gradsync.reduction import ReduceOp, check_operation, dtype_of


class Gradsync:
    """What moves the bytes between ranks.

    Args:
        backend: what init_process_group is given.

    Attributes:
        rank: this rank's number.
        backend: what carries the bytes.
        versions: of what it runs on.
        barrier: returns once all ranks have called it.
        wait: returns once all that was begun on a device has been done.
        close: leaves in order.
    """

    def __init__(self, backend: str) -> None:
        self._communicator = gs.init_process_group(backend=backend)
        self._xp, self.wait = array_module(self._communicator)
        self.rank = self._communicator.rank
        self.backend = self._communicator.backend
        self.barrier = self._communicator.barrier
        self.close = gs.destroy_process_group
        self.versions = {"gradsync": gs.__version__, "numpy": np.__version__}
        if self._xp is not np:
            self.versions["cupy"] = str(self._xp.__version__)

    def empty(self, elements: int, dtype: str) -> Any:
        """Returns an array where the backend wants it, every page touched."""
        return self._xp.zeros(elements, dtype_of(dtype))

    def fill(self, target: Any, values: Array | int) -> None:
        """Writes a host array, or 0, into an array of `empty`."""
        target[...] = values if isinstance(values, int) else self._xp.asarray(values)

    def to_host(self, array: Any) -> Any:
        """Returns an array of `empty` as NumPy's."""
        return array if self._xp is np else self._xp.asnumpy(array)

    def operation(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        """Returns what runs the collective once on these arrays.

        Raises:
            NotOffered: there is no such operator for this dtype.
        """
        comm, source, target, op = self._communicator, buffers.source, buffers.target, case.op
        if op:
            _check(op, case.dtype)
        after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        in_place = source is target  # as one writes it then: without out=
        return {
            ALL_REDUCE: lambda: comm.all_reduce(source, op) if in_place else comm.all_reduce(source, op, out=target),
            REDUCE: lambda: comm.reduce(source, op, ROOT, out=None if in_place else target),
            REDUCE_SCATTER: lambda: comm.reduce_scatter(source, op, out=target),
            BROADCAST: lambda: comm.broadcast(source, ROOT),
            ALL_GATHER: lambda: comm.all_gather(source, out=target),
            GATHER: lambda: comm.gather(source, ROOT, out=target),
            SCATTER: lambda: comm.scatter(source, ROOT, out=target),
            ALL_TO_ALL: lambda: comm.all_to_all(source, out=target),
            EXCHANGE: lambda: comm.exchange(source, dest=after, out=target, source=before),
        }[case.collective]


def _check(op: str, dtype: str) -> None:
    try:
        check_operation(ReduceOp.parse(op), dtype_of(dtype))
    except UnsupportedDtype as error:
        raise NotOffered(str(error)) from None
