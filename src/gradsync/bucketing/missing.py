"""Zeros in place of gradients that a rank has none for, as an unused parameter of a model."""

from __future__ import annotations

from typing import Any

from gradsync.bucketing.bucket_memory import BucketMemory
from gradsync.bucketing.plan import GradientSpec
from gradsync.communicators.communicator import Communicator
from gradsync.reduction import Array, dtype_of


class Zeros:
    """Arrays of zeros by place; kept, and zeroed again when they are needed again."""

    def __init__(self) -> None:
        self._arrays: dict[int, Array] = {}

    def at(self, position: int, spec: GradientSpec, memory: BucketMemory | None, communicator: Communicator) -> Any:
        """Returns zeros for one place: where gradients live in the buckets, the place itself."""
        array: Any
        if memory is not None:
            array = memory.views[position]
        elif position in self._arrays:
            array = self._arrays[position]
        else:
            array = self._arrays[position] = communicator.arrays.empty(spec.shape, dtype_of(spec.dtype), None)
        communicator.arrays.fill(array, 0)
        return array

    def clear(self) -> None:
        """Lets go of the arrays."""
        self._arrays.clear()
