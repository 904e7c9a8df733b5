"""Collectives that NCCL does not support, or supports only in part, built from NCCL's own collectives.

NCCL gathers only parts of equal size, and CuPy's binding has no gather, scatter or all-to-all. So this file builds
these collectives, and the all-gather of unequal parts, from sends and receives in one NCCL group. NCCL launches such a
group as one kernel. Ranks send no message for an empty part. Each rank copies its own part within its GPU, without
NCCL.

NCCL has no 16-bit integers. So this file casts 16-bit integers to 32 bits for the reduction, and casts the result back;
an overflow wraps around. NCCL cannot multiply complex numbers. So each rank that gets a complex product gathers the
contributions, and multiplies them in rank order. NCCL's reduce-scatter supports only parts of equal size. For unequal
parts this file calls reduce once for each part, all in one group.

For a mean of n ranks, NCCL multiplies each contribution by the factor 1 / n, which it rounds to the dtype. In half
precision, if n is not a power of two, this rounding makes all results too large, or all results too small, by up to 0.2
% (in bfloat16). For such a mean NCCL computes only the sum; this file divides the sum by n in float32, and rounds the
quotient once. A float16 sum may overflow even if the mean does not, so the ranks first divide float16 contributions by
a power of two. The division is exact, except for quotients that are too small for float16.

Source: NCCL, src/enqueue.cc (ncclAvg multiplies each contribution by a factor, and then sums).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import cupy
import numpy as np

from gradsync.communicators.backend import Bounds, part_of
from gradsync.communicators.nccl.device_arrays import DeviceArrays
from gradsync.communicators.nccl.library import Nccl
from gradsync.reduction import ReduceOp, dtype_name


class Collectives:
    """Launches collectives on the current stream.

    All arrays are flat and on this rank's device. Collectives without arithmetic take arrays of bytes (uint8).

    Args:
        nccl: this rank's NCCL communicator.
        arrays: the object with the functions for arrays on this rank's device.
        rank: this rank's number in the communicator.
        world_size: the number of ranks in the communicator.
    """

    def __init__(self, nccl: Nccl, arrays: DeviceArrays, rank: int, world_size: int) -> None:
        self._nccl = nccl
        self._arrays = arrays
        self._rank = rank
        self._world_size = world_size
        self._others = [peer for peer in range(world_size) if peer != rank]
        self._plain: dict[tuple[Any, ReduceOp], bool] = {}  # by dtype and operator: a few tens of entries

    # -- Movements -----------------------------------------------------------------------------------------------

    def broadcast(self, flat: Any, root: int) -> None:
        """Copies the root's bytes to all ranks."""
        if flat.size:
            self._nccl.broadcast(flat, root)

    def all_gather(self, source: Any, target: Any, bounds: Bounds) -> None:
        """Gathers the parts of all ranks on every rank; `source` may be a view of this rank's part of `target`."""
        if _is_even(bounds):
            if target.size:
                self._nccl.all_gather(source, target)
            return
        copy_bytes(source, target[part_of(bounds, self._rank)])
        with self._nccl.group():
            for peer in self._others:
                self.send(source, peer)
                self.receive(target[part_of(bounds, peer)], peer)

    def gather(self, source: Any, target: Any | None, bounds: Bounds, root: int) -> None:
        """Gathers the parts of all ranks in the root's `target`; other ranks pass None as target.

        On the root, `source` may be a view of the root's part of `target`.
        """
        if target is None:
            self.send(source, root)
            return
        copy_bytes(source, target[part_of(bounds, self._rank)])
        with self._nccl.group():
            for peer in self._others:
                self.receive(target[part_of(bounds, peer)], peer)

    def scatter(self, source: Any | None, target: Any, bounds: Bounds, root: int) -> None:
        """Sends each rank its part of the root's `source`; other ranks pass None as source."""
        if source is None:
            self.receive(target, root)
            return
        copy_bytes(source[part_of(bounds, self._rank)], target)
        with self._nccl.group():
            for peer in self._others:
                self.send(source[part_of(bounds, peer)], peer)

    def all_to_all(self, source: Any, target: Any, send_bounds: Bounds, receive_bounds: Bounds) -> None:
        """Sends part i of every rank's source to rank i."""
        copy_bytes(source[part_of(send_bounds, self._rank)], target[part_of(receive_bounds, self._rank)])
        with self._nccl.group():
            for peer in self._others:
                self.send(source[part_of(send_bounds, peer)], peer)
                self.receive(target[part_of(receive_bounds, peer)], peer)

    def send(self, part: Any, peer: int) -> None:
        """Sends a part of an array to another rank, which must receive as many bytes. Skips an empty part."""
        if part.size:
            self._nccl.send(part, peer)

    def receive(self, part: Any, peer: int) -> None:
        """Receives a part of an array from another rank, which must send as many bytes. Skips an empty part."""
        if part.size:
            self._nccl.receive(part, peer)

    # -- Reductions ----------------------------------------------------------------------------------------------

    def is_plain(self, dtype: Any, op: ReduceOp) -> bool:
        """Whether NCCL itself correctly reduces arrays of this dtype with this operator."""
        plain = self._plain.get((dtype, op))
        if plain is None:
            is_indirect = self._must_divide(dtype, op) or self._must_gather(dtype, op) or self._nccl.wire(dtype).widened
            plain = self._plain[dtype, op] = not is_indirect
        return plain

    def all_reduce(self, source: Any, target: Any, op: ReduceOp) -> None:
        """Reduces the sources of all ranks into every rank's `target`, which may be the same array as its `source`."""
        if not source.size:
            return
        if self.is_plain(source.dtype, op):
            self._nccl.all_reduce(source, target, op)
        elif self._must_gather(source.dtype, op):
            bounds = range(0, (self._world_size + 1) * source.nbytes, source.nbytes)
            gathered = self._rows(source)
            self.all_gather(_bytes(source), _bytes(gathered), bounds)
            _multiply(gathered, target)
        else:
            self._reduce_indirectly(source, target, op, self.all_reduce)

    def reduce(self, source: Any, target: Any | None, op: ReduceOp, root: int) -> None:
        """Reduces the sources of all ranks into the root's `target`, which may be the same array as its `source`.

        Other ranks pass None as target.
        """
        if not source.size:
            return
        if self.is_plain(source.dtype, op):
            self._nccl.reduce(source, target, op, root)
        elif self._must_gather(source.dtype, op):
            bounds = range(0, (self._world_size + 1) * source.nbytes, source.nbytes)
            gathered = None if target is None else self._rows(source)
            self.gather(_bytes(source), None if gathered is None else _bytes(gathered), bounds, root)
            if gathered is not None:
                _multiply(gathered, target)
        else:
            self._reduce_indirectly(source, target, op, lambda s, t, o: self.reduce(s, t, o, root))

    def reduce_scatter(self, source: Any, target: Any, bounds: Bounds, op: ReduceOp) -> None:
        """Reduces part i of all sources into the `target` of rank i.

        The target may be a view of part i of that rank's `source`.
        """
        if not source.size:
            return
        if self._must_gather(source.dtype, op):
            gathered = self._rows(target)
            sent = [bound * source.itemsize for bound in bounds]
            received = [rank * target.nbytes for rank in range(self._world_size + 1)]
            self.all_to_all(_bytes(source), _bytes(gathered), sent, received)
            _multiply(gathered, target)
        elif not self.is_plain(source.dtype, op):
            self._reduce_indirectly(source, target, op, lambda s, t, o: self.reduce_scatter(s, t, bounds, o))
        elif _is_even(bounds):
            self._nccl.reduce_scatter(source, target, op)
        else:
            # The block contains only NCCL's own calls, because NCCL launches them when the group ends.
            with self._nccl.group():
                for root in range(self._world_size):
                    part = source[part_of(bounds, root)]
                    if part.size:
                        self._nccl.reduce(part, target if root == self._rank else None, op, root)

    def _reduce_indirectly(
        self, source: Any, target: Any | None, op: ReduceOp, reduce: Callable[[Any, Any, ReduceOp], None]
    ) -> None:
        """Reduces with a different operator or in a wider dtype, and converts the result."""
        if self._must_divide(source.dtype, op):
            shift = 0 if dtype_name(source.dtype) == "bfloat16" else (self._world_size - 1).bit_length()
            if shift:
                scaled = target if target is not None and target.size == source.size else cupy.empty_like(source)
                self._arrays.multiply(source, 2.0**-shift, scaled)
                source = scaled
            reduce(source, target, ReduceOp.SUM)
            if target is not None:
                self._arrays.divide(target, self._world_size / 2.0**shift)
            return
        wide = source.astype(self._nccl.wire(source.dtype).widened)
        if target is None:
            reduce(wide, None, op)
            return
        wide_target = wide if target.size == source.size else cupy.empty(target.size, wide.dtype)
        reduce(wide, wide_target, op)
        target[...] = wide_target.astype(target.dtype)

    def _must_divide(self, dtype: Any, op: ReduceOp) -> bool:
        is_power_of_two = self._world_size & (self._world_size - 1) == 0
        return op is ReduceOp.MEAN and not is_power_of_two and dtype_name(dtype) in ("bfloat16", "float16")

    def _must_gather(self, dtype: Any, op: ReduceOp) -> bool:
        return op is ReduceOp.PROD and dtype.kind == "c"

    def _rows(self, flat: Any) -> Any:
        """Returns an uninitialised array with one row for each rank; each row has the size of `flat`."""
        return cupy.empty((self._world_size, flat.size), flat.dtype)


def copy_bytes(source: Any, target: Any) -> None:
    """Copies bytes on the device, unless source and target are the same memory."""
    if source.size and source.data.ptr != target.data.ptr:
        target.data.copy_from_device_async(source.data, source.size)


def _is_even(bounds: Bounds) -> bool:
    """Whether all parts have the same size."""
    return all(end - begin == bounds[1] - bounds[0] for begin, end in pairwise(bounds))


def _bytes(array: Any) -> Any:
    return array.reshape(-1).view(np.uint8)


def _multiply(contributions: Any, target: Any) -> None:
    """Multiplies the ranks' contributions in rank order, and writes the product into `target`."""
    product = contributions[0]
    for contribution in contributions[1:]:
        product = product * contribution
    target[...] = product
