"""The communicator of one rank: moves no data. With forced packing, the baseline that measures packing alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradsync.bucketing.flat_buffer import FlatBuffer
from gradsync.communicators.agreement import Agreement
from gradsync.communicators.base import Communicator
from gradsync.reduction import Array, ReduceOp


class LocalCommunicator(Communicator):
    """A world of one rank: every reduction gives its input.

    Args:
        force_packing: pack each list into a flat buffer and split it back, as a communicator between processes
            would, so that benchmarks can measure what packing costs.
    """

    backend = "local"

    def __init__(self, *, force_packing: bool = False) -> None:
        super().__init__(rank=0, world_size=1, group="local")
        self.force_packing = force_packing
        self._buffer = FlatBuffer(np)

    def _all_reduce_list(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, agreement: Agreement
    ) -> None:
        if self.force_packing:
            flat = self._buffer.pack(sources)
            self._buffer.split(flat, targets)
            return
        for source, target in zip(sources, targets, strict=True):
            if target is not source:
                np.copyto(target, source)

    def _broadcast(self, flat: Array, root: int, agreement: Agreement) -> None:
        pass  # the root is the only rank

    def _agree(self, agreement: Agreement) -> None:
        pass  # a rank agrees with itself
