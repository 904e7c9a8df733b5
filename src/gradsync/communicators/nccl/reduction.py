"""What NCCL computes on flat arrays: types, operators, and the cases that it lacks.

NCCL has no 16-bit integers: they travel widened, and wrap around when they are cast back, as they would have. It has
no product of complex numbers: they are gathered, and multiplied in rank order. It scatters the result of a reduction in
equal parts only: other parts are reduced one by one, in one group.

Its mean multiplies each contribution by 1 / n, rounded to the dtype. That of bfloat16 is off by up to 0.2 % where n is
no power of two, always to the same side, so there the sum is divided instead. Of float16 it is off by less than a
rounding; the mean stays NCCL's, as a sum overflows where a mean does not.

Source: NCCL, src/enqueue.cc (ncclAvg is a sum with a factor before it).
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from gradsync.communicators.backend import Bounds, part_of
from gradsync.communicators.nccl import device_values
from gradsync.communicators.nccl.handle import NcclHandle
from gradsync.communicators.nccl.movement import NcclMovement, current_stream, is_even
from gradsync.reduction import ReduceOp, dtype_name


class NcclReduction:
    """Launches reductions on the current stream, by operators that the dtype table allows.

    Args:
        handle: NCCL's communicator.
        movement: of the same communicator.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, handle: NcclHandle, movement: NcclMovement, rank: int, world_size: int) -> None:
        self._handle = handle
        self._library = handle.library
        self._movement = movement
        self._rank = rank
        self._world_size = world_size

    def all_reduce(self, source: Any, target: Any, op: ReduceOp) -> None:
        """Reduces a flat array into another one, or into itself."""
        if not source.size:
            return
        wire = self._library.wire(source.dtype)
        if self._must_divide(source, op):
            self.all_reduce(source, target, ReduceOp.SUM)
            device_values.divide(target, self._world_size)
        elif wire.widened is not None:
            wide = source.astype(wire.widened)
            self.all_reduce(wide, wide, op)
            target[...] = wide.astype(target.dtype)
        elif self._must_gather(source, op):
            gathered = cupy.empty((self._world_size, source.size), source.dtype)
            sizes = [source.nbytes] * self._world_size
            self._movement.all_gather(_bytes(source), _bytes(gathered.reshape(-1)), _bounds(sizes))
            _multiply(gathered, target)
        else:
            count, code = source.size * wire.per_element, self._library.op(op)
            self._handle.call("allReduce", *_pointers(source, target), count, wire.datatype, code, current_stream())

    def reduce(self, source: Any, target: Any | None, op: ReduceOp, root: int) -> None:
        """Reduces into the root's target, which may be its source; None elsewhere."""
        if not source.size:
            return
        wire = self._library.wire(source.dtype)
        if self._must_divide(source, op):
            self.reduce(source, target, ReduceOp.SUM, root)
            if target is not None:
                device_values.divide(target, self._world_size)
        elif wire.widened is not None:
            wide = source.astype(wire.widened)
            self.reduce(wide, None if target is None else wide, op, root)
            if target is not None:
                target[...] = wide.astype(target.dtype)
        elif self._must_gather(source, op):
            self._multiply_on_root(source, target, root)
        else:
            count, code = source.size * wire.per_element, self._library.op(op)
            pointers = _pointers(source, target)
            self._handle.call("reduce", *pointers, count, wire.datatype, code, root, current_stream())

    def reduce_scatter(self, source: Any, target: Any, bounds: Bounds, op: ReduceOp) -> None:
        """Reduces each part into the target of its rank, which may be exactly that part of its source."""
        if not source.size:
            return
        wire = self._library.wire(source.dtype)
        if self._must_divide(source, op):
            self.reduce_scatter(source, target, bounds, ReduceOp.SUM)
            device_values.divide(target, self._world_size)
        elif wire.widened is not None:
            wide = source.astype(wire.widened)
            wide_target = cupy.empty(target.size, wide.dtype)
            self.reduce_scatter(wide, wide_target, bounds, op)
            target[...] = wide_target.astype(target.dtype)
        elif self._must_gather(source, op):
            self._multiply_parts(source, target, bounds)
        elif is_even(bounds):
            count, code = target.size * wire.per_element, self._library.op(op)
            self._handle.call("reduceScatter", *_pointers(source, target), count, wire.datatype, code, current_stream())
        else:
            with self._handle.group():
                for root in range(self._world_size):
                    part = source[part_of(bounds, root)]
                    self.reduce(part, target if root == self._rank else None, op, root)

    def _must_divide(self, source: Any, op: ReduceOp) -> bool:
        is_power_of_two = self._world_size & (self._world_size - 1) == 0
        return op is ReduceOp.MEAN and not is_power_of_two and dtype_name(source.dtype) == "bfloat16"

    def _must_gather(self, source: Any, op: ReduceOp) -> bool:
        return op is ReduceOp.PROD and source.dtype.kind == "c"

    def _multiply_on_root(self, source: Any, target: Any | None, root: int) -> None:
        """Memory: world_size times the array, on the root."""
        bounds = _bounds([source.nbytes] * self._world_size)
        if target is None:
            self._movement.gather(_bytes(source), None, bounds, root)
            return
        gathered = cupy.empty((self._world_size, source.size), source.dtype)
        self._movement.gather(_bytes(source), _bytes(gathered.reshape(-1)), bounds, root)
        _multiply(gathered, target)

    def _multiply_parts(self, source: Any, target: Any, bounds: Bounds) -> None:
        """Memory: world_size times this rank's part."""
        gathered = cupy.empty((self._world_size, target.size), source.dtype)
        send_bounds = [bound * source.itemsize for bound in bounds]
        receive_bounds = _bounds([target.nbytes] * self._world_size)
        self._movement.all_to_all(_bytes(source), _bytes(gathered.reshape(-1)), send_bounds, receive_bounds)
        _multiply(gathered, target)


def _pointers(source: Any, target: Any | None) -> tuple[int, int]:
    return source.data.ptr, 0 if target is None else target.data.ptr


def _bytes(flat: Any) -> Any:
    return flat.view(np.uint8)


def _bounds(sizes: list[int]) -> Bounds:
    return [0, *np.cumsum(sizes).tolist()]


def _multiply(contributions: Any, target: Any) -> None:
    """Multiplies the rows, in rank order."""
    product = contributions[0]
    for contribution in contributions[1:]:
        product = product * contribution
    target[...] = product
