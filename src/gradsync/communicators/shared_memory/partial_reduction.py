"""Reductions through shared memory of which each rank, or only one, gets a result: reduce_scatter and reduce.

As in reduction.py the operands are taken in rank order, so the bits are those of an all-reduce, but for complex
products, as there.
"""

from __future__ import annotations

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Bounds, largest_part, part_of
from gradsync.communicators.host_copy import copy_words, word_dtype
from gradsync.communicators.shared_memory.arena import Scratch, Workplace, share_begin, shares_bytes
from gradsync.reduction import Array, ReduceOp, reduce_into


class PartialReduction:
    """reduce_scatter and reduce of one communicator.

    Args:
        workplace: this rank's.
        scratch: private memory.
    """

    def __init__(self, workplace: Workplace, scratch: Scratch) -> None:
        self._rings = workplace.rings
        self._barrier = workplace.barrier
        self._scratch = scratch
        self._rank = workplace.rank
        self._world_size = workplace.world_size
        self._peers = workplace.peers()
        self._round_bytes = workplace.round_bytes
        self._share_bytes = workplace.share_bytes

    def reduce_scatter(self, source: Array, target: Array, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        """Every rank publishes what others own, and reduces what it owns."""
        dtype = source.dtype
        own = source[part_of(bounds, self._rank)]
        largest, step = largest_part(bounds), self._share_bytes // dtype.itemsize
        for begin in range(0, max(largest, 1), step):
            share_bytes = min(step, largest - begin) * dtype.itemsize
            region_bytes = shares_bytes(self._world_size, share_bytes)
            at = self._rings.next_place(region_bytes)
            for peer in self._peers:
                part = source[part_of(bounds, peer)][begin : begin + step]
                self._publish(part, at + share_begin(self._rank, peer, share_bytes))
            self._barrier.meet(agreement)
            result = target[begin : begin + step]
            contributions = [
                self._contribution(owner, at + share_begin(owner, self._rank, share_bytes), result)
                for owner in range(self._world_size)
            ]
            contributions[self._rank] = own[begin : begin + step]
            self._reduce(op, contributions, result)

    def reduce(self, source: Array, target: Array | None, op: ReduceOp, root: int, agreement: Agreement) -> None:
        """Every rank but the root publishes; the root reduces while they publish the next round."""
        step = self._round_bytes // source.dtype.itemsize
        for begin in range(0, max(source.size, 1), step):
            part = source[begin : begin + step]
            at = self._rings.next_place(part.nbytes)
            if target is None:
                self._publish(part, at)
            self._barrier.meet(agreement)
            if target is not None:
                contributions = [self._contribution(owner, at, part) for owner in range(self._world_size)]
                contributions[root] = part
                self._reduce(op, contributions, target[begin : begin + step])

    def _contribution(self, owner: int, at: int, like: Array) -> Array:
        """Returns what a rank has published at a place: as many elements as `like` has."""
        begin = at // like.itemsize
        return self._rings.of(like.dtype)[owner][begin : begin + like.size]

    def _reduce(self, op: ReduceOp, contributions: list[Array], result: Array) -> None:
        if not result.size:
            return
        own = contributions[self._rank]
        if self._rank > 1 and np.may_share_memory(own, result):  # in place: it would be overwritten before its turn
            kept = self._scratch.own(own.dtype, own.size)
            np.copyto(kept, own)
            contributions[self._rank] = kept
        with np.errstate(all="ignore"):  # see ShmBackend.all_reduce
            reduce_into(op, contributions, result, self._scratch.accumulator(result.dtype, result.size))

    def _publish(self, part: Array, at: int) -> None:
        word = word_dtype(part.dtype)
        begin = at // word.itemsize
        copy_words(part.view(word), self._rings.of(word)[self._rank][begin : begin + part.size])
