"""Reductions through shared memory of which each rank, or only one, gets a result: reduce_scatter and reduce.

As in shared_reduction.py the operands are taken in rank order, so the bits are those of an all-reduce. The memory is
used as shared_movement.py tells.
"""

from __future__ import annotations

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Bounds, largest_part
from gradsync.communicators.host_copy import copy_words, word_dtype
from gradsync.communicators.shared_barrier import SharedBarrier
from gradsync.communicators.shared_reduction import Scratch
from gradsync.communicators.shared_slots import Shares, SlotsOf
from gradsync.reduction import Array, ReduceOp, reduce_into


class PartialReduction:
    """reduce_scatter and reduce of one communicator.

    Args:
        slots_of: the shared buffers, under a dtype.
        barrier: where the ranks meet.
        scratch: private memory.
        rank: this rank.
        world_size: number of ranks.
        shares: how a slot is shared out.
        round_bytes: how much of an array goes through a slot at a time.
    """

    def __init__(
        self,
        slots_of: SlotsOf,
        barrier: SharedBarrier,
        scratch: Scratch,
        rank: int,
        world_size: int,
        shares: Shares,
        round_bytes: int,
    ) -> None:
        self._slots_of = slots_of
        self._barrier = barrier
        self._scratch = scratch
        self._rank = rank
        self._world_size = world_size
        self._round_bytes = round_bytes
        self._shares = shares

    def reduce_scatter(self, source: Array, target: Array, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        """Every rank publishes what others own, and reduces what it owns."""
        dtype = source.dtype
        step = min(self._shares.bytes, self._round_bytes) // dtype.itemsize
        own = source[bounds[self._rank] : bounds[self._rank + 1]]
        for begin in range(0, max(largest_part(bounds), 1), step):
            slots = self._slots_of(dtype)[self._barrier.next_parity]
            for peer in range(self._world_size):
                if peer != self._rank:
                    part = source[bounds[peer] : bounds[peer + 1]][begin : begin + step]
                    self._publish(part, self._shares.part(slots[self._rank], self._rank, peer, part.size))
            self._barrier.meet(agreement)
            result = target[begin : begin + step]
            contributions = [
                self._shares.part(slot, owner, self._rank, result.size) for owner, slot in enumerate(slots)
            ]
            contributions[self._rank] = own[begin : begin + step]
            self._reduce(op, contributions, result)

    def reduce(self, source: Array, target: Array | None, op: ReduceOp, root: int, agreement: Agreement) -> None:
        """Every rank but the root publishes; the root reduces while they publish the next round."""
        dtype = source.dtype
        step = self._round_bytes // dtype.itemsize
        for begin in range(0, max(source.size, 1), step):
            slots = self._slots_of(dtype)[self._barrier.next_parity]
            part = source[begin : begin + step]
            if target is None:
                self._publish(part, slots[self._rank][: part.size])
            self._barrier.meet(agreement)
            if target is not None:
                contributions = [slot[: part.size] for slot in slots]
                contributions[root] = part
                self._reduce(op, contributions, target[begin : begin + step])

    def _reduce(self, op: ReduceOp, contributions: list[Array], result: Array) -> None:
        if not result.size:
            return
        own = contributions[self._rank]
        if self._rank > 1 and np.may_share_memory(own, result):  # in place: it would be overwritten before its turn
            kept = self._scratch.own(own.dtype, own.size)
            np.copyto(kept, own)
            contributions[self._rank] = kept
        with np.errstate(all="ignore"):  # see SharedMemoryCommunicator._all_reduce_list
            reduce_into(op, contributions, result, self._scratch.accumulator(result.dtype, result.size))

    @staticmethod
    def _publish(part: Array, place: Array) -> None:
        word = word_dtype(part.dtype)
        copy_words(part.view(word), place.view(word))
