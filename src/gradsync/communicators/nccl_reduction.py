"""What NCCL moves for one collective on one flat array: types, operators, and the two cases that it lacks.

NCCL has no 16-bit integers: they travel widened, and wrap around when they are cast back, as they would have. It has
no product of complex numbers: they are gathered, and multiplied on every rank in rank order.
"""

from __future__ import annotations

from typing import Any

import cupy

from gradsync.communicators.nccl_handle import NcclHandle
from gradsync.reduction import ReduceOp


class NcclReduction:
    """Launches collectives on the current stream.

    Args:
        handle: NCCL's communicator.
        world_size: number of ranks.
    """

    def __init__(self, handle: NcclHandle, world_size: int) -> None:
        self._handle = handle
        self._library = handle.library
        self._world_size = world_size

    def all_reduce(self, source: Any, target: Any, op: ReduceOp) -> None:
        """Reduces a flat array into another one, or into itself, by an operator that the dtype table allows."""
        if not source.size:
            return
        wire = self._library.wire(source.dtype)
        if wire.widened is not None:
            wide = source.astype(wire.widened)
            self.all_reduce(wide, wide, op)
            target[...] = wide.astype(target.dtype)
        elif wire.per_element == 2 and op is ReduceOp.PROD:
            self._multiply_complex(source, target)
        else:
            count = source.size * wire.per_element
            self._handle.call(
                "allReduce", source.data.ptr, target.data.ptr, count, wire.datatype, self._library.op(op), _stream()
            )

    def broadcast(self, flat: Any, root: int) -> None:
        """Copies the root's bytes to all ranks."""
        if flat.size:
            pointer = flat.data.ptr
            self._handle.call("broadcast", pointer, pointer, flat.nbytes, self._library.bytes_datatype, root, _stream())

    def _multiply_complex(self, source: Any, target: Any) -> None:
        """Memory: world_size times the array."""
        wire = self._library.wire(source.dtype)
        gathered = cupy.empty((self._world_size, source.size), source.dtype)
        self._handle.call(
            "allGather",
            source.data.ptr,
            gathered.data.ptr,
            source.size * wire.per_element,
            wire.datatype,
            _stream(),
        )
        product = gathered[0]
        for contribution in gathered[1:]:
            product = product * contribution
        target[...] = product


def _stream() -> int:
    return int(cupy.cuda.get_current_stream().ptr)
