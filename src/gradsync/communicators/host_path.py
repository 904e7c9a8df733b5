"""How bytes of host memory travel between the ranks of a communicator: what Python objects need.

A communicator on the CPU moves them by its own hooks; on GPUs they keep off the GPU (nccl/store_path.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Backend, Bounds
from gradsync.reduction import Array


class HostPath(ABC):
    """Moves bytes between ranks, within the communicator's turn. Every rank must call the same methods.

    Sources and results are 1-D arrays of uint8; `bounds` says where the parts of the ranks lie, and is the same on all
    ranks.
    """

    @abstractmethod
    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        """Agrees on the collective that begins; returns the numbers of every rank, as many on each.

        Raises:
            PlanMismatch: the ranks disagree; nothing was moved.
        """

    @abstractmethod
    def all_gather(self, source: Array, bounds: Bounds, agreement: Agreement) -> Array:
        """Returns the parts of all ranks; `source` is this rank's."""

    @abstractmethod
    def gather(self, source: Array, bounds: Bounds, root: int, agreement: Agreement) -> Array | None:
        """Returns the parts of all ranks on the root, None elsewhere; `source` is this rank's."""

    @abstractmethod
    def scatter(self, source: Array | None, bounds: Bounds, root: int, agreement: Agreement) -> Array:
        """Returns this rank's part of the root's source; None elsewhere."""


class OwnPath(HostPath):
    """The methods of a backend whose arrays live in host memory.

    Args:
        backend: of the communicator in whose turn this runs.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        """See HostPath."""
        return self._backend.share_numbers(numbers, agreement)

    def all_gather(self, source: Array, bounds: Bounds, agreement: Agreement) -> Array:
        """See HostPath."""
        target = np.empty(bounds[-1], np.uint8)
        self._backend.all_gather(source, target, bounds, agreement)
        return target

    def gather(self, source: Array, bounds: Bounds, root: int, agreement: Agreement) -> Array | None:
        """See HostPath."""
        target = np.empty(bounds[-1], np.uint8) if self._backend.rank == root else None
        self._backend.gather(source, target, bounds, root, agreement)
        return target

    def scatter(self, source: Array | None, bounds: Bounds, root: int, agreement: Agreement) -> Array:
        """See HostPath."""
        rank = self._backend.rank
        target = np.empty(bounds[rank + 1] - bounds[rank], np.uint8)
        self._backend.scatter(source, target, bounds, root, agreement)
        return target
