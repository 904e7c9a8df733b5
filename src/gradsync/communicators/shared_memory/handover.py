"""How the ranks of a communicator come to memory in which gradients live: one makes it, and hands it to the others."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gradsync.communicators.shared_memory.huge_pages import HUGE_PAGE_BYTES, take_huge_pages
from gradsync.communicators.shared_memory.resident import SharedResidentMemory
from gradsync.communicators.shared_memory.segment import (
    SegmentOffer,
    create_segment,
    map_segment,
    populate,
    reserve,
    take_segment,
)
from gradsync.communicators.shared_memory.workplace import Workplace
from gradsync.errors import BackendUnavailable

# From here on memory lies on huge pages, as far as they can be had within a time.
_HUGE_FROM_BYTES = 4 * HUGE_PAGE_BYTES
_SECONDS_PER_HUGE_PAGE = 10e-3  # on average; on an idle machine it is one or two
_TICKET_WORDS = 12


class Handover(NamedTuple):
    """How the ranks of a communicator come to the memory that one of them makes.

    Attributes:
        workplace: this rank's.
        share: share(numbers) returns the numbers of all ranks, by rank.
        look_for_failures: look_for_failures(ranks) raises why it would be in vain to wait for them.
        timeout_seconds: how long to wait for them.
    """

    workplace: Workplace
    share: Callable[[Sequence[int]], list[list[int]]]
    look_for_failures: Callable[[list[int]], None]
    timeout_seconds: float

    def make_memory(self, size_bytes: int) -> SharedResidentMemory:
        """Makes resident memory; every rank must call it.

        Raises:
            BackendUnavailable: this rank cannot have it, or no rank can.
        """
        rank, world_size = self.workplace.rank, self.workplace.world_size
        is_large = size_bytes >= _HUGE_FROM_BYTES
        page_bytes = HUGE_PAGE_BYTES if is_large else mmap.PAGESIZE
        part_bytes = max(-(-size_bytes // page_bytes), 1) * page_bytes
        begin, end = rank * part_bytes, (rank + 1) * part_bytes
        descriptor = self._offer(part_bytes * world_size) if rank == 0 else self._take()
        try:
            # Each rank its own, at once, and where the memory is near its processor.
            reserve(descriptor, begin, end)
        except BaseException:
            os.close(descriptor)
            raise
        mapping = map_segment(descriptor, on_huge_pages=is_large)
        if is_large:
            take_huge_pages(mapping, begin, end, part_bytes // page_bytes * _SECONDS_PER_HUGE_PAGE)
        populate(mapping, begin, end)
        whole = np.frombuffer(mapping, np.uint8).reshape(world_size, part_bytes)
        return SharedResidentMemory([part[:size_bytes] for part in whole], rank)

    def _offer(self, size_bytes: int) -> int:
        """Returns the descriptor of new memory that all the others have taken.

        Raises:
            BackendUnavailable: there is no such memory, or another rank could not take it.
        """
        try:
            descriptor, offer = _open_offer(size_bytes)
        except BackendUnavailable:
            self.share(_as_words(b""))
            raise
        try:
            self.share(_as_words(offer.ticket))
            self._serve(offer, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        finally:
            offer.close()
        return descriptor

    def _serve(self, offer: SegmentOffer, descriptor: int) -> None:
        barrier, peers = self.workplace.barrier, self.workplace.peers()
        deadline = time.monotonic() + self.timeout_seconds
        served = 0

        def look_around() -> None:
            # Who has gone on to the next meeting has taken the memory, or will not come for it.
            behind = [peer for peer in peers if not barrier.is_ahead(peer)]
            if len(peers) - len(behind) > served:
                raise BackendUnavailable("another rank could not take the shared memory")
            self.look_for_failures(behind)

        while served < len(peers):
            offer.serve(descriptor, 1, deadline, look_around)
            served += 1

    def _take(self) -> int:
        """Returns the descriptor that rank 0 offers.

        Raises:
            BackendUnavailable: it has none to offer, or this rank cannot take it.
        """
        ticket = _as_bytes(self.share(_as_words(b""))[0])
        if not ticket:
            raise BackendUnavailable("the first rank could not make the shared memory")
        try:
            return take_segment(ticket, self.timeout_seconds)
        except OSError as error:
            raise BackendUnavailable(f"cannot take the shared memory: {error}") from error


def _open_offer(size_bytes: int) -> tuple[int, SegmentOffer]:
    descriptor = create_segment(size_bytes, allocated=False)
    try:
        return descriptor, SegmentOffer()
    except OSError as error:
        os.close(descriptor)
        raise BackendUnavailable(f"cannot offer the shared memory to the other ranks: {error}") from error


def _as_words(ticket: bytes) -> list[int]:
    """Returns a ticket as numbers, as many for every ticket: its length first."""
    padded = ticket.ljust(8 * _TICKET_WORDS, b"\0")
    return [len(ticket), *np.frombuffer(padded, np.int64).tolist()]


def _as_bytes(words: Sequence[int]) -> bytes:
    return np.array(words[1:], np.int64).tobytes()[: words[0]]
