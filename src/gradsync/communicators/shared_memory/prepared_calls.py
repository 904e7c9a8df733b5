"""Collectives on small arrays over shared memory, with everything prepared that stays from call to call.

The same protocols as the long ways (reduction.py, movement.py, partial_reduction.py), so that
ranks on either way meet; a quarter to a half of their time. Only what needs no copy on the way is taken: contiguous
NumPy arrays of which one round holds all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gradsync.communicators.agreement import agreement_on
from gradsync.communicators.lifetime import Lifetime
from gradsync.communicators.shared_memory.barrier import SharedBarrier
from gradsync.communicators.shared_memory.host_copy import word_dtype
from gradsync.communicators.shared_memory.prepared_exchange import PreparedExchange, quiet_caller
from gradsync.communicators.shared_memory.prepared_movement import PreparedMovement, PreparedReduceScatter
from gradsync.communicators.shared_memory.rings import SharedRings, share_begin, shares_bytes
from gradsync.reduction import Array, ReduceOp

_MAX_PREPARED = 1024
_OPS = frozenset(op.value for op in ReduceOp)

_Prepared = PreparedExchange | PreparedMovement | PreparedReduceScatter


class PreparedCalls:
    """The prepared collectives of one communicator of several ranks.

    Args:
        lifetime: the communicator's.
        barrier: where the ranks meet.
        rings: the shared memory.
        rank: this rank.
        world_size: number of ranks.
        exchange_bytes: up to which size arrays are all-reduced by exchange.
        round_bytes, share_bytes: as for SharedMovement.
    """

    def __init__(
        self,
        lifetime: Lifetime,
        barrier: SharedBarrier,
        rings: SharedRings,
        rank: int,
        world_size: int,
        exchange_bytes: int,
        round_bytes: int,
        share_bytes: int,
    ) -> None:
        self._lifetime = lifetime
        self._barrier = barrier
        self._rings = rings
        self._rank = rank
        self._world_size = world_size
        self._exchange_bytes = exchange_bytes
        self._round_bytes = round_bytes
        self._share_bytes = share_bytes
        self._quietly = quiet_caller()
        self._known: dict[Any, _Prepared] = {}
        self._ways: dict[str, Callable[[Array, Any], _Prepared | None]] = {
            "all_reduce": self._all_reduce,
            "broadcast": self._broadcast,
            "all_gather": self._all_gather,
            "all_to_all": self._all_to_all,
            "reduce_scatter": self._reduce_scatter,
        }

    def run(self, what: str, array: Any, out: Any, detail: object) -> Any:
        """Runs a collective with all checks, or returns None having done nothing; see Backend._shortcut."""
        if type(array) is not np.ndarray or type(detail) not in (str, int):
            return None
        key = (what, detail, array.shape, array.dtype)
        prepared = self._known.get(key)
        if prepared is None:
            if self._lifetime.ended_because is not None or not self._is_small(array):
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
        with self._lifetime.turn(what, prepared.agreement):
            prepared.run(array, target)
        return target

    def _is_small(self, array: Array) -> bool:
        """Whether an array may be worth it: has something to move, in words, and not too much."""
        is_words = word_dtype(array.dtype).kind in "uc" and not array.dtype.hasobject
        return is_words and 0 < array.nbytes <= self._round_bytes * self._world_size

    def release(self) -> None:
        """Lets go of the shared memory."""
        self._known.clear()

    # -- Preparing; None where a call is for the long way, which also tells what is wrong with it ------------------

    def _all_reduce(self, array: Array, op: str) -> PreparedExchange | None:
        if array.nbytes > self._exchange_bytes or op not in _OPS or not PreparedExchange.suits(array, ReduceOp(op)):
            return None
        agreement = agreement_on("all_reduce", array.shape, array.dtype, op)
        return PreparedExchange(
            agreement, ReduceOp(op), array.shape, array.dtype, self._rings, self._barrier, self._rank, self._quietly
        )

    def _movement(
        self, what: str, array: Array, detail: str, out_shape: tuple[int, ...] | None, region_bytes: int
    ) -> PreparedMovement:
        agreement = agreement_on(what, array.shape, array.dtype, detail)
        place = self._rings, self._barrier, self._rank
        return PreparedMovement(agreement, array.dtype, out_shape, *place, region_bytes)

    def _broadcast(self, array: Array, root: int) -> PreparedMovement | None:
        if array.nbytes > self._round_bytes or type(root) is not int or not 0 <= root < self._world_size:
            return None
        movement = self._movement("broadcast", array, f"root {root}", None, array.nbytes)
        everything = slice(0, array.size)
        if root == self._rank:
            movement.publish(everything)
        else:
            movement.fetch(everything, root)
        return movement

    def _all_gather(self, array: Array, _: object) -> PreparedMovement | None:
        if array.nbytes > self._round_bytes:
            return None
        rows, *rest = array.shape or (1,)
        movement = self._movement("all_gather", array, "", (rows * self._world_size, *rest), array.nbytes)
        size = array.size
        movement.publish(slice(0, size))
        movement.keep(slice(0, size), slice(self._rank * size, (self._rank + 1) * size))
        for peer in self._peers():
            movement.fetch(slice(peer * size, (peer + 1) * size), peer)
        return movement

    def _all_to_all(self, array: Array, _: object) -> PreparedMovement | None:
        parts = self._parts(array)
        if parts is None:
            return None
        part_bytes = parts[0].stop * array.itemsize
        region_bytes = shares_bytes(self._world_size, part_bytes)
        movement = self._movement("all_to_all", array, "", array.shape or (1,), region_bytes)
        for peer in self._peers():
            movement.publish(parts[peer], share_begin(self._rank, peer, part_bytes))
        movement.keep(parts[self._rank], parts[self._rank])
        for peer in self._peers():
            movement.fetch(parts[peer], peer, share_begin(peer, self._rank, part_bytes))
        return movement

    def _reduce_scatter(self, array: Array, op: str) -> PreparedReduceScatter | None:
        parts = self._parts(array)
        if parts is None or op not in _OPS or not PreparedExchange.suits(array, ReduceOp(op)):
            return None
        agreement = agreement_on("reduce_scatter", array.shape, array.dtype, op)
        return PreparedReduceScatter(
            agreement, ReduceOp(op), array, parts, self._rings, self._barrier, self._rank, self._quietly
        )

    def _parts(self, array: Array) -> list[slice] | None:
        """Returns the elements of each rank's part where the rows divide equally and a share holds a part."""
        rows = (array.shape or (1,))[0]
        size = array.size // self._world_size
        if rows % self._world_size or size * array.itemsize > self._share_bytes:
            return None
        return [slice(rank * size, (rank + 1) * size) for rank in range(self._world_size)]

    def _peers(self) -> list[int]:
        """Returns the other ranks, the next one first: not all of them read the same ring at once."""
        return [(self._rank + step) % self._world_size for step in range(1, self._world_size)]
