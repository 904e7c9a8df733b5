"""Moving bytes through shared memory: broadcast, gathers, scatter, all-to-all; and the small numbers on their way.

Every rank owns a slot in each of two halves of the shared memory, used in turn: what is written for one meeting of the
ranks is read after it, and written again two meetings later, when all have left the one between and so are done with
reading. A large array goes in rounds of what fits into the slots; while some ranks still read one half, others already
fill the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Bounds, largest_part
from gradsync.communicators.host_copy import copy_words, pack_words, split_words
from gradsync.communicators.shared_barrier import SharedBarrier
from gradsync.communicators.shared_slots import Shares, SlotsOf
from gradsync.communicators.stream_plan import pieces_between
from gradsync.reduction import Array

_BYTE = np.dtype(np.uint8)
_NUMBER = np.dtype(np.int64)


class SharedMovement:
    """The movements of one communicator.

    Args:
        slots_of: the shared buffers, under a dtype.
        barrier: where the ranks meet.
        rank: this rank.
        world_size: number of ranks.
        shares: how a slot is shared out.
        round_bytes: how much of an array goes through a slot at a time.
    """

    def __init__(
        self, slots_of: SlotsOf, barrier: SharedBarrier, rank: int, world_size: int, shares: Shares, round_bytes: int
    ) -> None:
        self._slots_of = slots_of
        self._barrier = barrier
        self._rank = rank
        self._shares = shares
        self._round_bytes = round_bytes
        # Beginning with the next rank: not all of them read the same slot at once.
        self._peers = [(rank + step) % world_size for step in range(1, world_size)]

    def broadcast_list(self, flats: Sequence[Array], root: int, agreement: Agreement) -> None:
        """Copies the root's arrays of bytes into the others', straight out of and into the arrays."""
        sizes = tuple([flat.size for flat in flats])
        for begin, end in self._rounds(sum(sizes)):
            slot = self._slots()[root][: end - begin]
            pieces = [flats[array][low:high] for array, low, high in pieces_between(sizes, begin, end)]
            if self._rank == root and pieces:
                pack_words(pieces, slot)
            self._barrier.meet(agreement)
            if self._rank != root and pieces:
                split_words(slot, pieces)

    def all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement) -> None:
        """Gathers the bytes of all ranks on all ranks."""
        own = target[bounds[self._rank] : bounds[self._rank + 1]]
        for begin, end in self._rounds(largest_part(bounds)):
            slots = self._slots()
            part = source[begin:end]
            copy_words(part, slots[self._rank][: part.size])
            copy_words(part, own[begin:end])  # now that it is in the cache; the very same bytes in an in-place call
            self._barrier.meet(agreement)
            for peer in self._peers:
                self._fetch(slots[peer], target, bounds, peer, begin, end)

    def gather(self, source: Array, target: Array | None, bounds: Bounds, root: int, agreement: Agreement) -> None:
        """Gathers the bytes of all ranks on the root."""
        for begin, end in self._rounds(largest_part(bounds)):
            slots = self._slots()
            part = source[begin:end]
            if target is None:
                copy_words(part, slots[self._rank][: part.size])
                self._barrier.meet(agreement)
                continue
            copy_words(part, target[bounds[root] : bounds[root + 1]][begin:end])
            self._barrier.meet(agreement)
            for peer in self._peers:
                self._fetch(slots[peer], target, bounds, peer, begin, end)

    def scatter(self, source: Array | None, target: Array, bounds: Bounds, root: int, agreement: Agreement) -> None:
        """Deals out the root's bytes; it fills the slots of the others."""
        for begin, end in self._rounds(largest_part(bounds)):
            slots = self._slots()
            if source is None:
                self._barrier.meet(agreement)
                part = target[begin:end]
                copy_words(slots[self._rank][: part.size], part)
                continue
            for peer in self._peers:
                part = source[bounds[peer] : bounds[peer + 1]][begin:end]
                copy_words(part, slots[peer][: part.size])
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
        """Deals out every rank's bytes; a slot has a share for each of the other ranks."""
        rank = self._rank
        own_source = source[send_bounds[rank] : send_bounds[rank + 1]]
        own_target = target[receive_bounds[rank] : receive_bounds[rank + 1]]
        for begin, end in self._rounds(largest, min(self._shares.bytes, self._round_bytes)):
            slots = self._slots()
            for peer in self._peers:
                part = source[send_bounds[peer] : send_bounds[peer + 1]][begin:end]
                copy_words(part, self._shares.part(slots[rank], rank, peer, part.size))
            copy_words(own_source[begin:end], own_target[begin:end])
            self._barrier.meet(agreement)
            for peer in self._peers:
                part = target[receive_bounds[peer] : receive_bounds[peer + 1]][begin:end]
                copy_words(self._shares.part(slots[peer], peer, rank, part.size), part)

    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        """Returns the numbers of every rank, as many on each as fit into a slot."""
        slots = self._slots_of(_NUMBER)[self._barrier.next_parity]
        slots[self._rank][: len(numbers)] = numbers
        self._barrier.meet(agreement)
        return [[int(number) for number in slot[: len(numbers)]] for slot in slots]

    def _slots(self) -> Sequence[Array]:
        """Returns the slots, by rank, that belong to the next meeting."""
        return self._slots_of(_BYTE)[self._barrier.next_parity]

    def _rounds(self, size: int, step: int | None = None) -> Iterator[tuple[int, int]]:
        """Cuts [0, size) into what goes at a time; at least one round, in which the ranks meet."""
        step = step or self._round_bytes
        for begin in range(0, max(size, 1), step):
            yield begin, min(begin + step, size)

    @staticmethod
    def _fetch(slot: Array, target: Array, bounds: Bounds, peer: int, begin: int, end: int) -> None:
        """Copies bytes [begin, end) of a peer's part, as far as it has them, from where it has put them."""
        part = target[bounds[peer] : bounds[peer + 1]][begin:end]
        copy_words(slot[: part.size], part)
