"""Collectives on small arrays over shared memory, with everything prepared that stays from call to call.

The same protocols as the long ways (reduction.py, movement.py, partial_reduction.py), so that
ranks on either way meet; a quarter to a half of their time. Only what needs no copy on the way is taken: contiguous
NumPy arrays of which one round holds all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gradsync.communicators.agreement import (
    all_reduce_agreement,
    all_to_all_agreement,
    broadcast_agreement,
    gather_agreement,
    reduce_scatter_agreement,
)
from gradsync.communicators.backend import Backend, bounds_of, part_of, row_shape
from gradsync.communicators.host_copy import word_dtype
from gradsync.communicators.shared_memory.arena import Workplace, share_begin, shares_bytes
from gradsync.communicators.shared_memory.prepared_all_reduce import PreparedAllReduce, quiet_caller
from gradsync.communicators.shared_memory.prepared_movement import PreparedMovement, PreparedReduceScatter
from gradsync.reduction import Array, ReduceOp

_MAX_PREPARED = 1024
_OPS = frozenset(op.value for op in ReduceOp)

_PreparedCall = PreparedAllReduce | PreparedMovement | PreparedReduceScatter


class PreparedCalls:
    """The prepared collectives of one communicator of several ranks.

    Args:
        workplace: this rank's.
        backend: whose it is; has the communicator's lifetime once there is one.
    """

    def __init__(self, workplace: Workplace, backend: Backend) -> None:
        self._workplace = workplace
        self._backend = backend
        self._rank = workplace.rank
        self._world_size = workplace.world_size
        self._peers = workplace.peers()
        self._quietly = quiet_caller()
        self._known: dict[Any, _PreparedCall] = {}
        self._ways: dict[str, Callable[[Array, Any], _PreparedCall | None]] = {
            "all_reduce": self._all_reduce,
            "broadcast": self._broadcast,
            "all_gather": self._all_gather,
            "all_to_all": self._all_to_all,
            "reduce_scatter": self._reduce_scatter,
        }

    def run(self, what: str, array: Any, out: Any, detail: object) -> Any:
        """Runs a collective with all checks, or returns None having done nothing; see Backend.shortcut."""
        if type(array) is not np.ndarray or type(detail) not in (str, int):
            return None
        key = (what, detail, array.shape, array.dtype)
        prepared = self._known.get(key)
        if prepared is None:
            if self._backend.lifetime.ended_because is not None or not self._is_small(array):
                return None
            prepared = self._ways[what](array, detail)
            if prepared is None:
                return None
            if len(self._known) >= _MAX_PREPARED:
                self._known.clear()
            self._known[key] = prepared
        target = prepared.target(array, out)
        if target is None:
            return None
        with self._backend.lifetime.turn(what, prepared.agreement):
            prepared.run(array, target)
        return target

    def _is_small(self, array: Array) -> bool:
        """Whether an array may be worth it: has something to move, in words, and not too much."""
        is_words = word_dtype(array.dtype).kind in "uc" and not array.dtype.hasobject
        return is_words and 0 < array.nbytes <= self._workplace.round_bytes * self._world_size

    def release(self) -> None:
        """Lets go of the shared memory."""
        self._known.clear()

    # -- Preparing; None where a call is for the long way, which also tells what is wrong with it ------------------

    def _all_reduce(self, array: Array, name: str) -> PreparedAllReduce | None:
        if array.nbytes > self._workplace.small_bytes or not _can_reduce(array, name):
            return None
        op, shape, dtype = ReduceOp(name), array.shape, array.dtype
        agreement = all_reduce_agreement(shape, dtype, op)
        return PreparedAllReduce(agreement, op, shape, dtype, self._workplace, self._quietly)

    def _broadcast(self, array: Array, root: int) -> PreparedMovement | None:
        if array.nbytes > self._workplace.round_bytes or type(root) is not int or not 0 <= root < self._world_size:
            return None
        agreement = broadcast_agreement(array.shape, array.dtype, root)
        movement = PreparedMovement(agreement, array.shape, array.dtype, self._workplace, array.nbytes, in_place=True)
        everything = slice(0, array.size)
        if root == self._rank:
            movement.publish(everything)
        else:
            movement.fetch(everything, root)
        return movement

    def _all_gather(self, array: Array, _: object) -> PreparedMovement | None:
        if array.nbytes > self._workplace.round_bytes:
            return None
        rows, *rest = row_shape(array.shape)
        agreement = gather_agreement("all_gather", array.shape, array.dtype)
        out_shape = (rows * self._world_size, *rest)
        movement = PreparedMovement(agreement, out_shape, array.dtype, self._workplace, array.nbytes)
        everything, bounds = slice(0, array.size), bounds_of([array.size] * self._world_size, 1)
        movement.publish(everything)
        movement.keep(everything, part_of(bounds, self._rank))
        for peer in self._peers:
            movement.fetch(part_of(bounds, peer), peer)
        return movement

    def _all_to_all(self, array: Array, _: object) -> PreparedMovement | None:
        parts = self._parts(array)
        if parts is None:
            return None
        part_bytes = parts[0].stop * array.itemsize
        region_bytes = shares_bytes(self._world_size, part_bytes)
        agreement = all_to_all_agreement(array.shape, array.dtype)
        movement = PreparedMovement(agreement, row_shape(array.shape), array.dtype, self._workplace, region_bytes)
        for peer in self._peers:
            movement.publish(parts[peer], share_begin(self._rank, peer, part_bytes))
        movement.keep(parts[self._rank], parts[self._rank])
        for peer in self._peers:
            movement.fetch(parts[peer], peer, share_begin(peer, self._rank, part_bytes))
        return movement

    def _reduce_scatter(self, array: Array, name: str) -> PreparedReduceScatter | None:
        parts = self._parts(array)
        if parts is None or not _can_reduce(array, name):
            return None
        op = ReduceOp(name)
        agreement = reduce_scatter_agreement(array.shape, array.dtype, op)
        return PreparedReduceScatter(agreement, op, array, parts, self._workplace, self._quietly)

    def _parts(self, array: Array) -> list[slice] | None:
        """Returns the elements of each rank's part where the rows divide equally and a share holds a part."""
        rows = row_shape(array.shape)[0]
        size = array.size // self._world_size
        if rows % self._world_size or size * array.itemsize > self._workplace.share_bytes:
            return None
        bounds = bounds_of([size] * self._world_size, 1)
        return [part_of(bounds, rank) for rank in range(self._world_size)]


def _can_reduce(array: Array, name: str) -> bool:
    """Whether there is an operator of that name that arrays of this dtype can be reduced with as they are."""
    return name in _OPS and PreparedAllReduce.suits(array, ReduceOp(name))
