"""Sends Python objects between ranks with GPUs, through the store of the rendezvous server.

Sending an object must not wait for the GPU or use its memory, and the ranks may be on several machines. The ranks send
the bytes in rounds, called windows. In each window, every sender stores its next pieces on the server, every reader
reads them, all ranks wait for each other, and the senders delete the pieces. So the server never holds more than one
window, however large an object is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Bounds
from gradsync.communicators.failures import CAUSE_SECONDS, FailureMonitor, await_cause
from gradsync.errors import GradsyncError, RendezvousError
from gradsync.reduction import Array
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.frames import MAX_VALUE_BYTES

WINDOW_BYTES = 4 * 1024 * 1024  # the size of one window, for all senders together
_PAUSE_SECONDS = 0.02  # between two attempts to store a piece while the store is full

T = TypeVar("T")


class StorePath:
    """Implements HostPath (see backend.py) with the store of the rendezvous server.

    Args:
        client: this rank's connection to the rendezvous server; the client's ranks are the communicator's ranks.
        group: the communicator's name.
        failures: the failures that the server reports.
        timeout_seconds: how long a rank waits for another rank's next piece.
        agree: a function that raises PlanMismatch if the ranks disagree on the collective that begins.
        check: a function that every wait calls; it raises an error if another rank has failed or closed the
            communicator.
    """

    def __init__(
        self,
        client: RendezvousClient,
        group: str,
        failures: FailureMonitor,
        timeout_seconds: float,
        agree: Callable[[Agreement], None],
        check: Callable[[], None],
    ) -> None:
        self._client = client
        self._keys = f"objects/{group}"
        self._failures = failures
        self._timeout_seconds = timeout_seconds
        self._agree = agree
        self._check = check
        self._moves = 0

    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        """See HostPath."""
        self._agree(agreement)
        mine = np.array(numbers, np.int64).view(np.uint8)
        shared = np.empty((self._client.world_size, len(numbers)), np.int64)
        bounds = range(0, shared.nbytes + mine.size, mine.size)
        self.all_gather(mine, shared.reshape(-1).view(np.uint8), bounds, agreement)
        rows: list[list[int]] = shared.tolist()
        return rows

    def all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement) -> None:
        """See HostPath."""
        parts = _parts(target, bounds)
        rank = self._client.rank
        parts[rank][...] = source
        if self._client.world_size > 1:
            incoming = {sender: part for sender, part in enumerate(parts) if sender != rank}
            self._move([part.size for part in parts], {rank: source}, incoming)

    def gather(self, source: Array, target: Array | None, bounds: Bounds, root: int, agreement: Agreement) -> None:
        """See HostPath."""
        sizes = _sizes_without_root(root, bounds)
        if target is None:
            self._move(sizes, {self._client.rank: source}, {})
            return
        parts = _parts(target, bounds)
        parts[root][...] = source
        self._move(sizes, {}, {sender: part for sender, part in enumerate(parts) if sender != root})

    def scatter(self, source: Array | None, target: Array, bounds: Bounds, root: int, agreement: Agreement) -> None:
        """See HostPath."""
        sizes = _sizes_without_root(root, bounds)
        if source is None:
            self._move(sizes, {}, {self._client.rank: target})
            return
        parts = _parts(source, bounds)
        self._move(sizes, {reader: part for reader, part in enumerate(parts) if reader != root}, {})
        target[...] = parts[root]

    def _move(self, sizes: Sequence[int], outgoing: Mapping[int, Array], incoming: Mapping[int, Array]) -> None:
        """Sends and receives numbered streams of bytes. Every rank must call it, with the same sizes.

        Args:
            sizes: the number of bytes of each stream.
            outgoing: stream number -> the bytes that this rank sends in that stream.
            incoming: stream number -> the buffer for the bytes that this rank receives in that stream.
        """
        self._moves += 1
        try:
            self._move_windows(sizes, outgoing, incoming)
        except GradsyncError:
            # If another rank has stopped because of a failure elsewhere, that failure is the reason, and is raised
            # instead.
            await_cause(CAUSE_SECONDS, self._check)
            raise

    def _move_windows(self, sizes: Sequence[int], outgoing: Mapping[int, Array], incoming: Mapping[int, Array]) -> None:
        senders = max(1, sum(size > 0 for size in sizes))
        window = max(1, WINDOW_BYTES // senders)
        for begin in range(0, max(sizes), window):
            stored: list[str] = []
            try:
                for number, data in outgoing.items():
                    for key, piece in self._pieces(number, data, begin, window):
                        stored.append(key)
                        self._put(key, piece.tobytes())
                for number, room in incoming.items():
                    for key, piece in self._pieces(number, room, begin, window):
                        piece[...] = np.frombuffer(self._get(key), np.uint8)
                self._await(lambda seconds: self._client.barrier(self._keys, timeout_seconds=seconds))
            finally:
                self._remove(stored)

    def _pieces(self, number: int, stream: Array, begin: int, window: int) -> Iterator[tuple[str, Array]]:
        """Yields the server's key and the memory of each piece of a stream in one window."""
        end = min(begin + window, stream.size)
        for offset in range(begin, end, MAX_VALUE_BYTES):
            piece = stream[offset : min(offset + MAX_VALUE_BYTES, end)]
            yield f"{self._keys}/{self._moves}/{number}/{offset}", piece

    def _put(self, key: str, data: bytes) -> None:
        """Stores a piece on the server. Waits while the store, which all communicators use, is full."""
        began = time.monotonic()
        while True:
            try:
                self._client.set(key, data)
                return
            except RendezvousError:
                self._client.check()  # raises an error if a rank or the server has failed
                waited_seconds = time.monotonic() - began
                if waited_seconds >= self._timeout_seconds:
                    raise
            self._check()
            self._failures.warn(waited_seconds, None)
            time.sleep(_PAUSE_SECONDS)

    def _get(self, key: str) -> bytes:
        return self._await(lambda seconds: self._client.get(key, timeout_seconds=seconds))

    def _await(self, ask: Callable[[float], T]) -> T:
        return self._failures.await_answer(ask, self._timeout_seconds, self._check)

    def _remove(self, keys: Sequence[str]) -> None:
        with contextlib.suppress(GradsyncError):  # the next call raises the failure
            for key in keys:
                self._client.delete(key)


def _sizes_without_root(root: int, bounds: Bounds) -> list[int]:
    """Returns the number of bytes of each rank's part; 0 for the root, which sends nothing to itself."""
    return [end - begin if rank != root else 0 for rank, (begin, end) in enumerate(pairwise(bounds))]


def _parts(whole: Array, bounds: Bounds) -> list[Array]:
    return [whole[begin:end] for begin, end in pairwise(bounds)]
