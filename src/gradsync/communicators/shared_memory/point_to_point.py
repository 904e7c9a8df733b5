"""Messages between two ranks of a shared-memory communicator.

Each ordered pair of ranks has two cache lines. The sender writes one cache line, the receiver writes the other, and
both sides read both. To post its message, each side writes the digest and the size of the message, and then the number
of the message, to its own cache line. Then each side compares the digests and sizes of both sides, so both sides get
the same result. The bytes go through four parts of the sender's buffer (SLOTS), which successive pieces of the message
use in turn. The sender counts the pieces that it has written. The receiver counts the pieces that it has read. Each
side continues as far as the count of the other side allows.

Neither side can be more than one message ahead, because a message ends for the sender only when the receiver has read
the whole message. A side that is one message ahead posts the next message while the slower side may still have to
compare the current message. So each cache line has two words for digests and two words for sizes, which successive
messages use alternately.

A transfer never waits for its peer: `advance` does the work that is possible now. So one thread can send and receive at
the same time, and ranks that exchange in pairs or rings of any size cannot deadlock. A rank that waits checks for
failures in the same way as at the barrier. The waiting rank also checks for messages that cannot arrive because the
other rank waits in a collective.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from gradsync.communicators.agreement import mismatch
from gradsync.communicators.backend import Message
from gradsync.communicators.failures import exchange_descriptions, publish_description
from gradsync.communicators.host_copy import copy_words
from gradsync.communicators.shared_memory.barrier import (
    ANY_ROUND,
    SPINS,
    WORDS_PER_RANK,
    SharedBarrier,
    pauses,
)
from gradsync.reduction import Array
from gradsync.rendezvous.client import RendezvousClient

# The eight words of a cache line. Each side of a message writes its own cache line.
_NUMBER = 0  # the number of the last message that this side has posted
_DIGESTS = 1  # two words, for messages of even and odd number
_SIZES = 3  # two words, for messages of even and odd number
_PROGRESS = 5  # the number of pieces of the message that this side has written or read

# Measured as the fastest size: smaller pieces need more calls, and a receiver begins later with larger pieces.
PIECE_BYTES = 128 * 1024
SLOTS = 4

_NOTHING = np.empty(0, np.uint8)


class Transfer:
    """The messages of one direction between this rank and a peer, one after the other.

    Args:
        words: the cache lines of all channels, as 8-byte words.
        client: the client through which ranks send descriptions of messages on which they disagree.
        channel: the name of this direction, for these descriptions.
        own: the index of the first word of this rank's cache line of the channel.
        other: the index of the first word of the peer's cache line of the channel.
        slots: the sender's slots.
        peer: the number of the other rank in the communicator.

    Attributes:
        peer, channel: see Args.
        number: the number of the last message.
        is_over: whether the last message was moved, or this side knows that the two sides disagree on this message.
        dispute: this rank's description of the last message, if the sides disagree on it; otherwise None.
    """

    def __init__(
        self,
        words: memoryview,
        client: RendezvousClient,
        channel: str,
        own: int,
        other: int,
        slots: Sequence[Array],
        peer: int,
    ) -> None:
        self.peer = peer
        self.is_over = True
        self.dispute: str | None = None
        self.channel = channel
        self._words = words
        self._client = client
        self._line = own
        self._other_line = other
        self._slots = slots
        self.number = 0

    def begin(self, message: Message) -> None:
        """Posts the next message, so that the other side can compare the digests and sizes of both sides."""
        words, line = self._words, self._line
        self._data = data = message.flat
        self.agreement = message.agreement
        self.number = number = self.number + 1
        self._pieces = -(-data.size // PIECE_BYTES)
        self._done = 0
        self._has_agreed = self.is_over = False
        self.dispute = None
        words[line + _DIGESTS + (number & 1)] = message.agreement.digest
        words[line + _SIZES + (number & 1)] = data.size
        words[line + _PROGRESS] = self._prepare()
        words[line + _NUMBER] = number  # publishes all words written before

    def advance(self) -> bool:
        """Does the work that is possible now. Returns True if there was any work, or if the message is over."""
        if self.is_over:
            return True
        if self._has_agreed:
            return self._move()
        if not self._compare():
            return self._move_ahead()
        self.advance()
        return True

    def _prepare(self) -> int:
        """Does the work that is possible before this rank posts the message.

        Returns the number of pieces that this rank has written to its slots.
        """
        return 0

    def _move_ahead(self) -> bool:
        """Sends a piece, if possible, before the receiver has posted its message. Returns whether a piece was sent."""
        return False

    def _move(self) -> bool:
        """Moves one piece, if that is possible now. Returns whether there was progress."""
        raise NotImplementedError

    def _compare(self) -> bool:
        """Compares the digests and sizes of both sides.

        Returns False if the other side has not posted its message yet.
        """
        words, other = self._words, self._other_line
        if words[other + _NUMBER] < self.number:
            return False
        odd = self.number & 1
        if words[other + _DIGESTS + odd] == self.agreement.digest and words[other + _SIZES + odd] == self._data.size:
            self._has_agreed = True
            if not self._pieces:
                self._end()
        else:
            self._disagree()
        return True

    def _piece(self, number: int) -> tuple[Array, Array]:
        """Returns a piece of the message, and the part of the slot that the piece uses."""
        if self._pieces == 1:
            return self._data, self._slots[0][: self._data.size]
        data = self._data[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
        return data, self._slots[number % SLOTS][: data.size]

    def _end(self) -> None:
        self.is_over = True
        self._data = _NOTHING  # drops the reference to the caller's array

    # -- Disagreement ------------------------------------------------------------------------------------------

    def is_awaiting_peer(self) -> bool:
        """Whether the peer has not posted this message yet."""
        if self.is_over or self._has_agreed:
            return False
        return self._words[self._other_line + _NUMBER] < self.number

    def withdraw(self) -> None:
        """Withdraws a message that the peer has not posted, and will not post while this rank waits."""
        self.number -= 1
        self._words[self._line + _NUMBER] = self.number
        self._end()

    def _disagree(self) -> None:
        self.dispute = self.agreement.described().to_text()
        publish_description(self._client, self.channel, self.number, self.dispute)
        self._end()


class Outgoing(Transfer):
    """The messages that this rank sends to a peer."""

    def _prepare(self) -> int:
        self._taken = 0
        # All slots are free: this rank has ended its earlier messages, and after a disagreement the receiver reads no
        # piece.
        if self._pieces:
            self._write()
        return self._done

    def _move_ahead(self) -> bool:
        if self._done == min(self._pieces, SLOTS):
            return False
        self._write_and_publish()
        return True

    def _move(self) -> bool:
        words, other = self._words, self._other_line
        taken = words[other + _PROGRESS]
        # A receiver that has posted the next message has read this whole message.
        if taken == self._pieces or words[other + _NUMBER] > self.number:
            self._end()
        elif self._done < self._pieces and self._done - taken < SLOTS:
            self._write_and_publish()
        elif taken == self._taken:
            return False
        self._taken = taken
        return True

    def _write_and_publish(self) -> None:
        self._write()
        self._words[self._line + _PROGRESS] = self._done

    def _write(self) -> None:
        copy_words(*self._piece(self._done))
        self._done += 1


class Incoming(Transfer):
    """The messages that this rank receives from a peer."""

    def _move(self) -> bool:
        if self._words[self._other_line + _PROGRESS] == self._done:
            return False
        data, slot = self._piece(self._done)
        copy_words(slot, data)
        self._done += 1
        self._words[self._line + _PROGRESS] = self._done
        if self._done == self._pieces:
            self._end()
        return True


class PointToPoint:
    """The channels of a communicator: one from every rank to every other rank.

    Args:
        areas: the areas of the shared memory, initially all zero; see areas_of in arena.py.
        buffers: [rank] -> the buffer of that rank for the pieces of messages that it sends, as bytes.
        rank: the number of this rank in the communicator.
        barrier: the communicator's barrier.
    """

    def __init__(
        self, areas: dict[str, memoryview], buffers: Sequence[Array], rank: int, barrier: SharedBarrier
    ) -> None:
        self._rank = rank
        self._world_size = len(buffers)
        self._barrier = barrier
        self._words = areas["message lines"]
        self._slots = [list(buffer[: SLOTS * PIECE_BYTES].reshape(SLOTS, PIECE_BYTES)) for buffer in buffers]
        self._transfers: dict[tuple[type[Transfer], int], Transfer] = {}

    def move(self, send: Message | None, receive: Message | None) -> None:
        """Sends a message, receives a message, or both at once. Returns when the receivers have read their messages.

        Args:
            send: the message to the rank `send.peer`. If `send.peer` is this rank itself, `receive.peer` must be this
                rank too, and the sizes must be equal.
            receive: the message from the rank `receive.peer`, with a writable array.

        Raises:
            PlanMismatch: the two ranks of a message disagree on the message, and both ranks raise this error. If all
                peers with unfinished messages wait for this rank in a collective, all ranks raise this error.
            RankFailed, CollectiveTimeout, RendezvousError: see SharedBarrier.agree. CollectiveTimeout names the peer as
                the missing rank. If two ranks both send first, and so wait for each other, both raise
                CollectiveTimeout.
        """
        if send is not None and receive is not None and send.peer == self._rank:
            copy_words(send.flat, receive.flat)
            return
        moves: list[tuple[Transfer, Message]] = []
        if receive is not None:  # receives first, so that a peer can begin while this rank copies its message
            moves.append((self._transfer(Incoming, receive.peer), receive))
        if send is not None:
            moves.append((self._transfer(Outgoing, send.peer), send))
        transfers = [transfer for transfer, _ in moves]
        for transfer, message in moves:
            transfer.begin(message)
        pending = transfers
        while pending:
            if not _advance(pending):
                self._wait(pending)
            pending = [transfer for transfer in pending if not transfer.is_over]
        if self._barrier.words[self._barrier.aborted]:  # a rank may have sent a message and then aborted
            self._barrier.check_for_aborts(ANY_ROUND)
        for transfer in transfers:
            if transfer.dispute is not None:
                self._raise_mismatch(transfer, transfer.dispute)

    def _wait(self, pending: Sequence[Transfer]) -> None:
        """Waits until one of the transfers has made progress or is over."""

        def missing() -> list[int]:
            _advance(pending)
            return [transfer.peer for transfer in pending if not transfer.is_over]

        check_for_failures = self._barrier.check_for_failures
        if self._barrier.has_failed():  # checked here because a short wait ends before `check_for_failures`
            check_for_failures(missing, 0.0, ANY_ROUND)
        for _ in range(SPINS):
            if _advance(pending):
                return
        for waited_seconds in pauses(time.monotonic()):
            if _advance(pending):
                return
            if waited_seconds is not None:
                check_for_failures(missing, waited_seconds, ANY_ROUND)
                self._check_for_collectives(pending)

    # -- Messages that cannot arrive ---------------------------------------------------------------------------

    def _check_for_collectives(self, pending: Sequence[Transfer]) -> None:
        """Raises PlanMismatch if the peers of all pending transfers wait for this rank in a collective."""
        # The barrier is read first, so that this rank sees every message that a peer posted before it arrived at the
        # barrier. All peers must wait there: a transfer with any other peer may still end, and must not stop in the
        # middle.
        if all(self._barrier.is_ahead(transfer.peer) and transfer.is_awaiting_peer() for transfer in pending):
            for transfer in pending:
                transfer.withdraw()
            self._barrier.agree(pending[0].agreement)  # the digests differ, so every rank raises PlanMismatch

    def _raise_mismatch(self, transfer: Transfer, dispute: str) -> NoReturn:
        barrier = self._barrier
        both = barrier.ranks[self._rank], barrier.ranks[transfer.peer]
        client = barrier.failures.client
        descriptions = exchange_descriptions(client, transfer.channel, transfer.number, dispute, both)
        raise mismatch(barrier.label, transfer.agreement, descriptions)

    def _transfer(self, kind: type[Transfer], peer: int) -> Transfer:
        """Returns the transfer to or from a peer. The first call for a peer makes the transfer."""
        transfer = self._transfers.get((kind, peer))
        if transfer is None:
            sender, receiver = (self._rank, peer) if kind is Outgoing else (peer, self._rank)
            line = 2 * (sender * self._world_size + receiver) * WORDS_PER_RANK
            own, other = line, line + WORDS_PER_RANK
            if kind is Incoming:
                own, other = other, own
            failures = self._barrier.failures
            channel = f"{failures.group}/{sender}-{receiver}"
            transfer = kind(self._words, failures.client, channel, own, other, self._slots[sender], peer)
            self._transfers[kind, peer] = transfer
        return transfer


def _advance(transfers: Sequence[Transfer]) -> bool:
    """Advances all transfers. Returns whether any of them has made progress or is over."""
    has_progress = False
    for transfer in transfers:
        has_progress = transfer.advance() or has_progress
    return has_progress
