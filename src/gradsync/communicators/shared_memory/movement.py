"""Moving bytes through shared memory: broadcast, gathers, scatter, all-to-all; and the small numbers on their way.

Ranks write into their own rings and, once all have met, read from the others'. A large array goes in rounds; while some
ranks still read one, others already write the next.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Bounds, largest_part
from gradsync.communicators.shared_memory.barrier import SharedBarrier
from gradsync.communicators.shared_memory.host_copy import copy_words, pack_words, split_words
from gradsync.communicators.shared_memory.rings import SharedRings, share_begin, shares_bytes
from gradsync.communicators.shared_memory.stream_plan import pieces_between
from gradsync.reduction import Array

_BYTE = np.dtype(np.uint8)
_NUMBER = np.dtype(np.int64)


class SharedMovement:
    """The movements of one communicator.

    Args:
        rings: the shared memory.
        barrier: where the ranks meet.
        rank: this rank.
        world_size: number of ranks.
        round_bytes: how much of an array goes through a ring at a time.
        share_bytes: likewise, of each of the parts of an array that are for different ranks.
    """

    def __init__(
        self,
        rings: SharedRings,
        barrier: SharedBarrier,
        rank: int,
        world_size: int,
        round_bytes: int,
        share_bytes: int,
    ) -> None:
        self._rings = rings
        self._barrier = barrier
        self._rank = rank
        self._world_size = world_size
        self._round_bytes = round_bytes
        self._share_bytes = share_bytes
        # Beginning with the next rank: not all of them read the same ring at once.
        self._peers = [(rank + step) % world_size for step in range(1, world_size)]

    def broadcast_list(self, flats: Sequence[Array], root: int, agreement: Agreement) -> None:
        """Copies the root's arrays of bytes into the others', straight out of and into the arrays."""
        sizes = tuple([flat.size for flat in flats])
        ring = self._rings.of(_BYTE)[root]
        for begin, end in self._rounds(sum(sizes), self._round_bytes):
            size = end - begin
            at = self._rings.take(size)
            pieces = [flats[array][low:high] for array, low, high in pieces_between(sizes, begin, end)]
            if self._rank == root and pieces:
                began = time.perf_counter()
                pack_words(pieces, ring[at : at + size])
                self._rings.wrote(size, began)
            self._barrier.meet(agreement)
            if self._rank != root and pieces:
                at = self._rings.places(size)[root]
                split_words(ring[at : at + size], pieces)

    def all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement) -> None:
        """Gathers the bytes of all ranks on all ranks."""
        own = target[bounds[self._rank] : bounds[self._rank + 1]]
        for begin, end in self._rounds(largest_part(bounds), self._round_bytes):
            at = self._rings.take(end - begin)
            part = source[begin:end]
            self._write(part, at)
            copy_words(part, own[begin:end])  # now that it is in the cache; the very same bytes in an in-place call
            self._barrier.meet(agreement)
            self._fetch_all(target, bounds, begin, end)

    def gather(self, source: Array, target: Array | None, bounds: Bounds, root: int, agreement: Agreement) -> None:
        """Gathers the bytes of all ranks on the root."""
        for begin, end in self._rounds(largest_part(bounds), self._round_bytes):
            at = self._rings.take(end - begin)
            part = source[begin:end]
            if target is None:
                self._write(part, at)
                self._barrier.meet(agreement)
                continue
            copy_words(part, target[bounds[root] : bounds[root + 1]][begin:end])
            self._barrier.meet(agreement)
            self._fetch_all(target, bounds, begin, end)

    def scatter(self, source: Array | None, target: Array, bounds: Bounds, root: int, agreement: Agreement) -> None:
        """Deals out the root's bytes; in its region there is a share for each of the others."""
        for begin, end in self._rounds(largest_part(bounds), self._share_bytes):
            region_bytes = shares_bytes(self._world_size, end - begin)
            at = self._rings.take(region_bytes)
            if source is None:
                self._barrier.meet(agreement)
                place = self._rings.places(region_bytes)[root] + share_begin(root, self._rank, end - begin)
                self._fetch(root, place, target[begin:end])
                continue
            for peer in self._peers:
                part = source[bounds[peer] : bounds[peer + 1]][begin:end]
                self._write(part, at + share_begin(root, peer, end - begin))
            copy_words(source[bounds[root] : bounds[root + 1]][begin:end], target[begin:end])
            self._barrier.meet(agreement)

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
        own_source = source[send_bounds[rank] : send_bounds[rank + 1]]
        own_target = target[receive_bounds[rank] : receive_bounds[rank + 1]]
        for begin, end in self._rounds(largest, self._share_bytes):
            region_bytes = shares_bytes(self._world_size, end - begin)
            at = self._rings.take(region_bytes)
            for peer in self._peers:
                part = source[send_bounds[peer] : send_bounds[peer + 1]][begin:end]
                self._write(part, at + share_begin(rank, peer, end - begin))
            copy_words(own_source[begin:end], own_target[begin:end])
            self._barrier.meet(agreement)
            places = self._rings.places(region_bytes)
            for peer in self._peers:
                part = target[receive_bounds[peer] : receive_bounds[peer + 1]][begin:end]
                self._fetch(peer, places[peer] + share_begin(peer, rank, end - begin), part)

    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        """Returns the numbers of every rank, as many on each as fit into a round."""
        count, itemsize = len(numbers), _NUMBER.itemsize
        rings = self._rings.of(_NUMBER)
        begin = self._rings.take(count * itemsize) // itemsize
        rings[self._rank][begin : begin + count] = numbers
        self._barrier.meet(agreement)
        places = [place // itemsize for place in self._rings.places(count * itemsize)]
        return [
            [int(number) for number in ring[place : place + count]] for ring, place in zip(rings, places, strict=True)
        ]

    @staticmethod
    def _rounds(size: int, step: int) -> Iterator[tuple[int, int]]:
        """Cuts [0, size) into what goes at a time; at least one round, in which the ranks meet."""
        for begin in range(0, max(size, 1), step):
            yield begin, min(begin + step, size)

    def _write(self, part: Array, at: int) -> None:
        """Copies bytes to a place in this rank's ring."""
        began = time.perf_counter()
        copy_words(part, self._rings.of(_BYTE)[self._rank][at : at + part.size])
        self._rings.wrote(part.size, began)

    def _fetch(self, owner: int, at: int, part: Array) -> None:
        """Copies bytes from a place in a rank's ring."""
        copy_words(self._rings.of(_BYTE)[owner][at : at + part.size], part)

    def _fetch_all(self, target: Array, bounds: Bounds, begin: int, end: int) -> None:
        """Copies bytes [begin, end) of the others' parts, as far as they have them, from the regions of this round."""
        places = self._rings.places(end - begin)
        for peer in self._peers:
            self._fetch(peer, places[peer], target[bounds[peer] : bounds[peer + 1]][begin:end])
