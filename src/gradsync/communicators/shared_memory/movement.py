"""Moving bytes through shared memory: broadcast, gathers, scatter, all-to-all; and the small numbers on their way.

Ranks write into their own rings and, once all have met, read from the others'. A large array goes in rounds; while some
ranks still read one, others already write the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Bounds, largest_part, part_of
from gradsync.communicators.host_copy import copy_words, pack_words, split_words
from gradsync.communicators.pieces import pieces_between
from gradsync.communicators.shared_memory.arena import Workplace, share_begin, shares_bytes
from gradsync.reduction import Array

_BYTE = np.dtype(np.uint8)
_NUMBER = np.dtype(np.int64)


class SharedMovement:
    """The movements of one communicator.

    Args:
        workplace: this rank's.
    """

    def __init__(self, workplace: Workplace) -> None:
        self._rings = workplace.rings
        self._barrier = workplace.barrier
        self._rank = workplace.rank
        self._world_size = workplace.world_size
        self._round_bytes = workplace.round_bytes
        self._share_bytes = workplace.share_bytes
        self._peers = workplace.peers()

    def broadcast_list(self, flats: Sequence[Array], root: int, agreement: Agreement) -> None:
        """Copies the root's arrays of bytes into the others', straight out of and into the arrays."""
        sizes = tuple([flat.size for flat in flats])
        ring = self._rings.of(_BYTE)[root]
        for begin, end in self._rounds(sum(sizes), self._round_bytes):
            size = end - begin
            at = self._rings.next_place(size)
            pieces = [flats[array][low:high] for array, low, high in pieces_between(sizes, begin, end)]
            if self._rank == root and pieces:
                pack_words(pieces, ring[at : at + size])
            self._barrier.meet(agreement)
            if self._rank != root and pieces:
                split_words(ring[at : at + size], pieces)

    def all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement) -> None:
        """Gathers the bytes of all ranks on all ranks."""
        own = target[part_of(bounds, self._rank)]
        for begin, end in self._rounds(largest_part(bounds), self._round_bytes):
            at = self._rings.next_place(end - begin)
            part = source[begin:end]
            self._write(part, at)
            self._meet(agreement, part, own[begin:end], is_first=begin == 0)
            self._fetch_all(target, bounds, begin, end, at)

    def gather(self, source: Array, target: Array | None, bounds: Bounds, root: int, agreement: Agreement) -> None:
        """Gathers the bytes of all ranks on the root."""
        for begin, end in self._rounds(largest_part(bounds), self._round_bytes):
            at = self._rings.next_place(end - begin)
            part = source[begin:end]
            if target is None:
                self._write(part, at)
                self._barrier.meet(agreement)
                continue
            self._meet(agreement, part, target[part_of(bounds, root)][begin:end], is_first=begin == 0)
            self._fetch_all(target, bounds, begin, end, at)

    def scatter(self, source: Array | None, target: Array, bounds: Bounds, root: int, agreement: Agreement) -> None:
        """Deals out the root's bytes; in its region there is a share for each of the others."""
        for begin, end in self._rounds(largest_part(bounds), self._share_bytes):
            region_bytes = shares_bytes(self._world_size, end - begin)
            at = self._rings.next_place(region_bytes)
            if source is None:
                self._barrier.meet(agreement)
                self._fetch(root, at + share_begin(root, self._rank, end - begin), target[begin:end])
                continue
            for peer in self._peers:
                part = source[part_of(bounds, peer)][begin:end]
                self._write(part, at + share_begin(root, peer, end - begin))
            own = source[part_of(bounds, root)][begin:end]
            self._meet(agreement, own, target[begin:end], is_first=begin == 0)

    def all_to_all(
        self,
        source: Array,
        target: Array,
        send_bounds: Bounds,
        receive_bounds: Bounds,
        largest: int,
        agreement: Agreement,
    ) -> None:
        """Deals out every rank's bytes; in its region there is a share for each of the others."""
        rank = self._rank
        own_source = source[part_of(send_bounds, rank)]
        own_target = target[part_of(receive_bounds, rank)]
        for begin, end in self._rounds(largest, self._share_bytes):
            region_bytes = shares_bytes(self._world_size, end - begin)
            at = self._rings.next_place(region_bytes)
            for peer in self._peers:
                part = source[part_of(send_bounds, peer)][begin:end]
                self._write(part, at + share_begin(rank, peer, end - begin))
            self._meet(agreement, own_source[begin:end], own_target[begin:end], is_first=begin == 0)
            for peer in self._peers:
                part = target[part_of(receive_bounds, peer)][begin:end]
                self._fetch(peer, at + share_begin(peer, rank, end - begin), part)

    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        """Returns the numbers of every rank, as many on each as fit into a round."""
        count, itemsize = len(numbers), _NUMBER.itemsize
        rings = self._rings.of(_NUMBER)
        begin = self._rings.next_place(count * itemsize) // itemsize
        rings[self._rank][begin : begin + count] = numbers
        self._barrier.meet(agreement)
        return [[int(number) for number in ring[begin : begin + count]] for ring in rings]

    @staticmethod
    def _rounds(size: int, step: int) -> Iterator[tuple[int, int]]:
        """Cuts [0, size) into what goes at a time; at least one round, in which the ranks meet."""
        for begin in range(0, max(size, 1), step):
            yield begin, min(begin + step, size)

    def _meet(self, agreement: Agreement, kept: Array, own: Array, *, is_first: bool) -> None:
        """Meets the others, and copies what stays on this rank; the very same bytes in an in-place call.

        In the first round that is after the ranks have agreed, before which nothing is written; in the others at once,
        while it is still in the cache.
        """
        if not is_first:
            copy_words(kept, own)
        self._barrier.meet(agreement)
        if is_first:
            copy_words(kept, own)

    def _write(self, part: Array, at: int) -> None:
        """Copies bytes to a place in this rank's memory."""
        copy_words(part, self._rings.of(_BYTE)[self._rank][at : at + part.size])

    def _fetch(self, owner: int, at: int, part: Array) -> None:
        """Copies bytes from a place in a rank's memory."""
        copy_words(self._rings.of(_BYTE)[owner][at : at + part.size], part)

    def _fetch_all(self, target: Array, bounds: Bounds, begin: int, end: int, at: int) -> None:
        """Copies bytes [begin, end) of the others' parts, as far as they have them, out of the regions at `at`."""
        for peer in self._peers:
            self._fetch(peer, at, target[part_of(bounds, peer)][begin:end])
