"""Collectives that NCCL does not have, or has for some cases only, built from NCCL's own collectives.

NCCL gathers equal parts only, and CuPy has no gather, scatter or all-to-all. So this file makes these collectives, and
the all-gather of unequal parts, from messages in one group, which NCCL launches as one kernel. Ranks send no message
for an empty part. A rank copies its own part on the device.

NCCL has no 16-bit integers: this file widens them for the reduction and casts the result back, so that it wraps around.
NCCL has no product of complex numbers: each rank gathers the contributions and multiplies them in rank order. NCCL
scatters the result of a reduction in equal parts only: this file reduces unequal parts one by one, in one group.

NCCL's mean multiplies each contribution by 1 / n, rounded to the dtype. In half precision, if n is no power of two, the
result is wrong by up to 0.2 % (bfloat16), always in the same direction. For such means this file divides the sum in
float32, and rounds the result once. A sum of float16 may overflow although the mean does not: the ranks first scale
their contributions down by a power of two, which is exact except for values too small for float16.

Source: NCCL, src/enqueue.cc (ncclAvg is a sum with a factor before it).
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
    """Launches collectives on the current stream. All arrays are flat and on the device. Copies and messages use uint8.

    Args:
        nccl: this rank's NCCL communicator.
        arrays: the functions for arrays on this rank's device.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, nccl: Nccl, arrays: DeviceArrays, rank: int, world_size: int) -> None:
        self._nccl = nccl
        self._arrays = arrays
        self._rank = rank
        self._world_size = world_size
        self._others = [peer for peer in range(world_size) if peer != rank]
        self._plain: dict[tuple[Any, ReduceOp], bool] = {}  # by dtype: a few tens at most

    # -- Movements -----------------------------------------------------------------------------------------------

    def broadcast(self, flat: Any, root: int) -> None:
        """Copies the root's bytes to all ranks."""
        if flat.size:
            self._nccl.broadcast(flat, root)

    def all_gather(self, source: Any, target: Any, bounds: Bounds) -> None:
        """Gathers the parts of all ranks on all ranks; the source may be exactly this rank's part of the target."""
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

        The root's source may be exactly the root's part of the target.
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
        """Sends a part to another rank, which must receive equally many bytes; sends nothing if it is empty."""
        if part.size:
            self._nccl.send(part, peer)

    def receive(self, part: Any, peer: int) -> None:
        """Receives a part from another rank, which must send equally many bytes; receives nothing if it is empty."""
        if part.size:
            self._nccl.receive(part, peer)

    # -- Reductions ----------------------------------------------------------------------------------------------

    def is_plain(self, dtype: Any, op: ReduceOp) -> bool:
        """Whether NCCL itself reduces these elements correctly."""
        plain = self._plain.get((dtype, op))
        if plain is None:
            detour = self._must_divide(dtype, op) or self._must_gather(dtype, op) or self._nccl.wire(dtype).widened
            plain = self._plain[dtype, op] = not detour
        return plain

    def all_reduce(self, source: Any, target: Any, op: ReduceOp) -> None:
        """Reduces the ranks' sources into every rank's target, which may be the rank's source."""
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
            self._by_detour(source, target, op, self.all_reduce)

    def reduce(self, source: Any, target: Any | None, op: ReduceOp, root: int) -> None:
        """Reduces the ranks' sources into the root's target, which may be the root's source.

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
            self._by_detour(source, target, op, lambda s, t, o: self.reduce(s, t, o, root))

    def reduce_scatter(self, source: Any, target: Any, bounds: Bounds, op: ReduceOp) -> None:
        """Reduces part i of the sources into the target of rank i, which may be exactly that part of its source."""
        if not source.size:
            return
        if self._must_gather(source.dtype, op):
            gathered = self._rows(target)
            sent = [bound * source.itemsize for bound in bounds]
            received = [rank * target.nbytes for rank in range(self._world_size + 1)]
            self.all_to_all(_bytes(source), _bytes(gathered), sent, received)
            _multiply(gathered, target)
        elif not self.is_plain(source.dtype, op):
            self._by_detour(source, target, op, lambda s, t, o: self.reduce_scatter(s, t, bounds, o))
        elif _is_even(bounds):
            self._nccl.reduce_scatter(source, target, op)
        else:
            with self._nccl.group():  # only NCCL's own reductions: a group launches nothing before its end
                for root in range(self._world_size):
                    part = source[part_of(bounds, root)]
                    if part.size:
                        self._nccl.reduce(part, target if root == self._rank else None, op, root)

    def _by_detour(
        self, source: Any, target: Any | None, op: ReduceOp, reduce: Callable[[Any, Any, ReduceOp], None]
    ) -> None:
        """Reduces with another operator or in another dtype, and converts the result."""
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
        """Returns an empty array with a row of this size for each rank."""
        return cupy.empty((self._world_size, flat.size), flat.dtype)


def copy_bytes(source: Any, target: Any) -> None:
    """Copies bytes on the device, unless source and target are the same."""
    if source.size and source.data.ptr != target.data.ptr:
        target.data.copy_from_device_async(source.data, source.size)


def _is_even(bounds: Bounds) -> bool:
    """Whether all parts are of one size."""
    return all(end - begin == bounds[1] - bounds[0] for begin, end in pairwise(bounds))


def _bytes(array: Any) -> Any:
    return array.reshape(-1).view(np.uint8)


def _multiply(contributions: Any, target: Any) -> None:
    """Multiplies the rows, in rank order."""
    product = contributions[0]
    for contribution in contributions[1:]:
        product = product * contribution
    target[...] = product
