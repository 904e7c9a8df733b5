"""Bytes between the ranks of one MPI communicator: messages in both directions at once, and MPI's own collectives.

Among few ranks each sends straight to every other one, which costs no more bytes than MPI's algorithms and fewer
copies; among many, MPI's collectives need fewer messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from gradsync.communicators.backend import Bounds, part_of
from gradsync.communicators.host_copy import copy_words
from gradsync.communicators.mpi.waiting import MpiWaiting
from gradsync.reduction import Array

# Up to here every rank sends to every other one.
DIRECT_RANKS = 16
# MPI 3 counts in 32 bits.
_PIECE_BYTES = 2**30
_COUNT_LIMIT = 2**31

# What messages between two ranks are for. Those of collectives keep apart from those of send and recv.
TAG_COLLECTIVE, TAG_SHARES, TAG_DATA, TAG_TEXT = range(1, 5)
TAG_HELLO_OF_SENDER, TAG_HELLO_OF_RECEIVER, TAG_BARRED_SENDER, TAG_BARRED_RECEIVER = range(5, 9)

Parts = Iterable[tuple[int, Array]]


class MpiTransport:
    """One rank's end of a communicator of MPI.

    Args:
        mpi: the module mpi4py.MPI.
        comm: gradsync's own communicator, on which nobody else communicates.
        waiting: its waits.

    Attributes:
        mpi, comm, waiting: as given.
        rank, world_size: of `comm`.
        is_direct: whether the ranks are few.
        peers: the other ranks, in the order in which this one sends to them.
    """

    def __init__(self, mpi: Any, comm: Any, waiting: MpiWaiting) -> None:
        self.mpi = mpi
        self.comm = comm
        self.waiting = waiting
        self.rank: int = comm.Get_rank()
        self.world_size: int = comm.Get_size()
        self.is_direct = self.world_size <= DIRECT_RANKS
        # The next one first: not all ranks send to the same one at once.
        self.peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    # -- Messages ----------------------------------------------------------------------------------------------

    def post(self, sends: Parts, receives: Parts, tag: int) -> list[Any]:
        """Begins messages; each is (peer, bytes). Empty ones do not travel: both ends know their sizes.

        Returns:
            Requests, to be finished; the arrays must stay until then.
        """
        comm, byte = self.comm, self.mpi.BYTE
        requests = [comm.Irecv([piece, byte], peer, tag) for peer, array in receives for piece in _pieces(array)]
        for peer, array in sends:
            requests += [comm.Isend([piece, byte], peer, tag) for piece in _pieces(array)]
        return requests

    def post_all(self, outgoing: Sequence[Array], incoming: Sequence[Array], tag: int) -> list[Any]:
        """The same between this rank and each other one, whose bytes stand at its number; those at the own one stay."""
        sends = [(peer, outgoing[peer]) for peer in self.peers]
        return self.post(sends, [(peer, incoming[peer]) for peer in self.peers], tag)

    def take(self, peer: int, tag: int, count: int) -> Array:
        """Returns a message of so many words that Iprobe has found."""
        words = np.zeros(count, np.uint64)
        self.comm.Recv(words, peer, tag)
        return words

    def _move(self, sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]]) -> None:
        self.waiting.finish(self.post(sends, receives, TAG_COLLECTIVE), (sends, receives))

    def _move_all(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> None:
        self.waiting.finish(self.post_all(outgoing, incoming, TAG_COLLECTIVE), (outgoing, incoming))

    # -- Collectives -------------------------------------------------------------------------------------------

    def all_gather(self, source: Array, target: Array, bounds: Bounds) -> None:
        """See the hooks of backend.py, like the others below; all ranks have agreed."""
        own = target[part_of(bounds, self.rank)]
        _copy(source, own)
        if self._goes_directly(bounds):
            self._move_all([own] * self.world_size, _parts(target, bounds))
        else:
            request = self.comm.Iallgatherv(self.mpi.IN_PLACE, self._layout(target, bounds))
            self.waiting.finish([request], target)

    def gather(self, source: Array, target: Array | None, bounds: Bounds, root: int) -> None:
        """Gathers on the root; no target elsewhere."""
        if target is not None:
            _copy(source, target[part_of(bounds, root)])
        if self._goes_directly(bounds):
            if target is None:
                self._move([(root, source)], [])
            else:
                self._move([], [(peer, target[part_of(bounds, peer)]) for peer in self.peers])
            return
        if target is None:
            request = self.comm.Igatherv([source, self.mpi.BYTE], None, root)
        else:
            request = self.comm.Igatherv(self.mpi.IN_PLACE, self._layout(target, bounds), root)
        self.waiting.finish([request], (source, target))

    def scatter(self, source: Array | None, target: Array, bounds: Bounds, root: int) -> None:
        """Deals out the root's bytes; no source elsewhere."""
        if source is not None:
            _copy(source[part_of(bounds, root)], target)
        if self._goes_directly(bounds):
            if source is None:
                self._move([], [(root, target)])
            else:
                self._move([(peer, source[part_of(bounds, peer)]) for peer in self.peers], [])
            return
        if source is None:
            request = self.comm.Iscatterv(None, [target, self.mpi.BYTE], root)
        else:
            request = self.comm.Iscatterv(self._layout(source, bounds), self.mpi.IN_PLACE, root)
        self.waiting.finish([request], (source, target))

    def all_to_all(self, source: Array, target: Array, send_bounds: Bounds, receive_bounds: Bounds) -> None:
        """Deals out every rank's bytes; MPI's own way sends as many messages."""
        rank = self.rank
        _copy(source[part_of(send_bounds, rank)], target[part_of(receive_bounds, rank)])
        self._move_all(_parts(source, send_bounds), _parts(target, receive_bounds))

    def broadcast(self, flat: Array, root: int) -> None:
        """Copies the root's bytes into the others' arrays."""
        requests = [self.comm.Ibcast([piece, self.mpi.BYTE], root) for piece in _pieces(flat)]
        if requests:
            self.waiting.finish(requests, flat)

    def all_gather_numbers(self, numbers: Array) -> Array:
        """Returns the numbers of all ranks, a row for each, given as many of one dtype by each."""
        rows = np.empty((self.world_size, numbers.size), numbers.dtype)
        self.waiting.finish([self.comm.Iallgather(numbers, rows)], (numbers, rows))
        return rows

    def _goes_directly(self, bounds: Bounds) -> bool:
        """Whether parts go from rank to rank: the ranks are few, or the bytes more than MPI's collectives count."""
        return self.is_direct or bounds[-1] >= _COUNT_LIMIT

    def _layout(self, array: Array, bounds: Bounds) -> list[Any]:
        counts = [end - begin for begin, end in pairwise(bounds)]
        return [array, counts, list(bounds[:-1]), self.mpi.BYTE]


def _parts(array: Array, bounds: Bounds) -> list[Array]:
    """Returns the parts of all ranks, by rank."""
    return [array[begin:end] for begin, end in pairwise(bounds)]


def _pieces(array: Array) -> list[Array]:
    """Cuts bytes into what one message of MPI carries; both ends cut alike."""
    if array.nbytes <= _PIECE_BYTES:
        return [array] if array.size else []
    return [array[begin : begin + _PIECE_BYTES] for begin in range(0, array.nbytes, _PIECE_BYTES)]


def _copy(source: Array, target: Array) -> None:
    """Copies what stays on this rank; the very same memory in an in-place call."""
    if source.size and source.__array_interface__["data"][0] != target.__array_interface__["data"][0]:
        copy_words(source, target)
