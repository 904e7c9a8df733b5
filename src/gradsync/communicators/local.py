"""The communicator of one rank: moves no data. With forced packing, the baseline that measures packing alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradsync.bucketing.flat_buffer import FlatBuffer
from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Bounds, Message
from gradsync.communicators.base import Communicator
from gradsync.communicators.host_path import OwnPath
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
            _copy(source, target)

    def _reduce(self, source: Array, target: Array | None, op: ReduceOp, root: int, agreement: Agreement) -> None:
        _copy(source, target)

    def _reduce_scatter(self, source: Array, target: Array, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        _copy(source, target)

    def _broadcast_list(self, flats: Sequence[Array], root: int, agreement: Agreement) -> None:
        pass  # the root is the only rank

    def _all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement) -> None:
        _copy(source, target)

    def _gather(self, source: Array, target: Array | None, bounds: Bounds, root: int, agreement: Agreement) -> None:
        _copy(source, target)

    def _scatter(self, source: Array | None, target: Array, bounds: Bounds, root: int, agreement: Agreement) -> None:
        _copy(source, target)

    def _all_to_all(
        self,
        source: Array,
        target: Array,
        send_bounds: Bounds,
        receive_bounds: Bounds,
        largest: int,
        agreement: Agreement,
    ) -> None:
        _copy(source, target)

    def _exchange(self, send: Message | None, receive: Message | None) -> None:
        if send is not None and receive is not None:  # with itself: there is nobody else
            _copy(send.flat, receive.flat)

    def _share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        return [list(numbers)]

    def _connect_group(self, members: tuple[int, ...], name: str) -> Communicator:
        return LocalCommunicator()

    def _make_host_path(self) -> OwnPath:
        return OwnPath(self)

    def _agree(self, agreement: Agreement) -> None:
        pass  # a rank agrees with itself


def _copy(source: Array | None, target: Array | None) -> None:
    """Gives a rank what it has handed in; where both are the same memory, there is nothing to do."""
    if source is not None and target is not None and target is not source:
        np.copyto(target, source)
