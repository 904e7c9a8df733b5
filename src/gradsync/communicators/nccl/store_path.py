"""Sends Python objects between ranks with GPUs, through the store of the rendezvous server.

Sending an object must not wait for the GPU or use its memory, and the ranks may be on several machines. The ranks send
the bytes in rounds, called windows. In each window, every sender stores its next pieces on the server, every reader
reads them, all ranks wait for each other, and the senders delete the pieces. So the server holds at most the pieces of
two windows of a communicator, however large an object is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Bounds, ByteCollectives, largest_part
from gradsync.communicators.failures import CAUSE_SECONDS, FailureMonitor, await_cause
from gradsync.errors import GradsyncError, RendezvousError
from gradsync.reduction import Array
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.frames import MAX_VALUE_BYTES

WINDOW_BYTES = 4 * 1024 * 1024  # the size of one window, for all senders together
_PAUSE_SECONDS = 0.02  # between two attempts to store a piece while the store is full

T = TypeVar("T")


class StorePath(ByteCollectives):
    """Moves bytes with the store of the rendezvous server; see Backend.make_host_path.

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
        super().__init__(client.rank, client.world_size)
        self._client = client
        self._keys = f"objects/{group}"
        self._failures = failures
        self._timeout_seconds = timeout_seconds
        self._agree = agree
        self._check = check
        self._moves = 0

    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        """See ByteCollectives. Only this method compares the digest: a collective on objects calls it first."""
        self._agree(agreement)
        return super().share_numbers(numbers, agreement)

    def all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement) -> None:
        parts = dict(enumerate(_parts(target, bounds)))
        streams, largest = sum(part.size > 0 for part in parts.values()), largest_part(bounds)
        parts.pop(self.rank)[...] = source
        self._move(streams, largest, {self.rank: source}, parts)

    def all_to_all(
        self,
        source: Array,
        target: Array,
        send_bounds: Bounds,
        receive_bounds: Bounds,
        largest: int,
        agreement: Agreement,
    ) -> None:
        rank = self.rank
        sent, received = _parts(source, send_bounds), _parts(target, receive_bounds)
        received[rank][...] = sent[rank]
        self._move(
            self.world_size,  # only `gather` and `scatter` call this method: at most one stream for each rank has bytes
            largest,
            {f"{rank}-{peer}": part for peer, part in enumerate(sent) if peer != rank},
            {f"{peer}-{rank}": part for peer, part in enumerate(received) if peer != rank},
        )

    def _move(self, streams: int, largest: int, outgoing: Mapping[Any, Array], incoming: Mapping[Any, Array]) -> None:
        """Sends and receives named streams of bytes.

        Every rank must call this method, with the same `streams` and `largest`.

        Args:
            streams: an upper limit of the number of streams of all ranks that have bytes.
            largest: the number of bytes of the longest stream.
            outgoing: the stream's name -> the bytes that this rank sends in that stream.
            incoming: the stream's name -> the buffer for the bytes that this rank receives in that stream.
        """
        if self.world_size == 1:
            return
        self._moves += 1
        window = max(1, WINDOW_BYTES // max(1, streams))
        try:
            for begin in range(0, largest, window):
                self._move_window(begin, window, outgoing, incoming)
        except GradsyncError:
            # If another rank has stopped because of a failure elsewhere, this rank raises that failure, which is the
            # cause of this error.
            await_cause(CAUSE_SECONDS, self._check)
            raise

    def _move_window(
        self, begin: int, window: int, outgoing: Mapping[Any, Array], incoming: Mapping[Any, Array]
    ) -> None:
        try:
            for name, data in outgoing.items():
                for key, piece in self._pieces(name, data, begin, window):
                    self._put(key, piece.tobytes())
            for name, room in incoming.items():
                for key, piece in self._pieces(name, room, begin, window):
                    piece[...] = np.frombuffer(self._get(key), np.uint8)
            self._await(lambda seconds: self._client.barrier(self._keys, timeout_seconds=seconds))
        finally:
            with contextlib.suppress(GradsyncError):  # the next call raises the failure
                for name in [name for name, data in outgoing.items() if data.size]:
                    self._client.delete(self._stream_key(name))

    def _pieces(self, name: Any, stream: Array, begin: int, window: int) -> Iterator[tuple[str, Array]]:
        """Yields the server's key and the memory of each piece of a stream in one window."""
        end = min(begin + window, stream.size)
        for offset in range(begin, end, MAX_VALUE_BYTES):
            piece = stream[offset : min(offset + MAX_VALUE_BYTES, end)]
            yield f"{self._stream_key(name)}/{offset}", piece

    def _stream_key(self, name: Any) -> str:
        return f"{self._keys}/{self._moves}/{name}"

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


def _parts(whole: Array, bounds: Bounds) -> list[Array]:
    return [whole[begin:end] for begin, end in pairwise(bounds)]
