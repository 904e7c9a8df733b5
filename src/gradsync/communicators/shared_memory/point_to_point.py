"""Messages between two ranks of a shared-memory communicator.

Each ordered pair of ranks has two cache lines. The sender writes one, the receiver writes the other, and both read both
lines. Each side posts its message (a digest, a size, then the number of the message) and compares it with the other's
post, so that both get the same result. The bytes go through the sender's slots, in turn. The sender counts the pieces
it has written, the receiver counts the pieces it has read, and each continues as far as the other's count allows.

Neither side can be more than one message ahead, because a message ends for the sender when all of it was read. One
message ahead is enough to overwrite a post that the slower side still has to compare, so digests and sizes have two
words each.

A transfer never waits: `advance` does what is possible now. So one thread drives both directions of a rank at once, and
ranks that exchange in pairs or rings of any size cannot deadlock. While a rank waits, it checks for failures as at the
barrier, and for messages that cannot arrive because the other rank is in a collective.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import numpy as np

from gradsync.communicators.agreement import Description
from gradsync.communicators.backend import Message
from gradsync.communicators.host_copy import copy_words
from gradsync.communicators.mismatch import message_mismatch
from gradsync.communicators.shared_memory.barrier import ANY_ROUND, SPINS, Rests, SharedBarrier, TextBoard
from gradsync.communicators.shared_memory.segment import whole_pages
from gradsync.reduction import Array

# The eight words of a line.
_NUMBER = 0  # the number of the last message that this side has posted
_DIGESTS = 1  # two words, for messages of even and odd number
_SIZES = 3  # likewise
_PROGRESS = 5  # the number of pieces of the message that were written, or read
_DESCRIBED = 6  # the number of the last message whose description this side has written
_READ = 7  # the number of the last message whose description this side has read

# Measured: smaller pieces need more calls, and larger pieces let the receiver begin later.
PIECE_BYTES = 128 * 1024
SLOTS = 4

_LINE_WORDS = 8
_TEXT_BYTES = 4096  # description of a message, for PlanMismatch
_SENDING, _RECEIVING = 0, 1  # the two texts, and the two lines, of a rank and a peer

_NOTHING = np.empty(0, np.uint8)


class Side:
    """The memory that one side of a channel writes.

    Args:
        line: index of the first word of the side's line.
        place: number of the side's text on the board.
    """

    __slots__ = ("line", "place")

    def __init__(self, line: int, place: int) -> None:
        self.line = line
        self.place = place


class Transfer:
    """The messages of one direction between this rank and a peer, one after the other.

    Args:
        words: the lines of all channels.
        board: the descriptions of messages that ranks disagree on.
        own: this rank's side.
        other: the peer's side.
        slots: the sender's slots.
        peer: the other rank, as numbered in the communicator.

    Attributes:
        peer: see above.
        is_over: whether the last message was moved, or both sides know that they disagree.
        descriptions: this rank's and the peer's message in words, if they disagree.
    """

    verb: str

    def __init__(
        self, words: memoryview, board: TextBoard, own: Side, other: Side, slots: Sequence[Array], peer: int
    ) -> None:
        self.peer = peer
        self.is_over = True
        self.descriptions: tuple[str, str] | None = None
        self._words = words
        self._board = board
        self._own = own
        self._line = own.line
        self._other = other
        self._other_line = other.line
        self._slots = slots
        self._number = 0
        self._dispute: str | None = None  # this rank's message in words, while both sides disagree

    def begin(self, message: Message) -> None:
        """Posts the next message."""
        words, line = self._words, self._line
        self._data = data = message.flat
        self.agreement = message.agreement
        self._number = number = self._number + 1
        self._pieces = -(-data.size // PIECE_BYTES)
        self._done = 0
        self._has_met = self.is_over = False
        self._dispute = self.descriptions = None
        words[line + _DIGESTS + (number & 1)] = message.agreement.digest
        words[line + _SIZES + (number & 1)] = data.size
        words[line + _PROGRESS] = self._prepare()
        words[line + _NUMBER] = number  # publishes all words written before

    def advance(self) -> bool:
        """Does what is possible now; returns whether it did anything, or the message is over."""
        if self.is_over:
            return True
        if self._dispute is not None:
            return self._exchange_descriptions(self._dispute)
        if self._has_met:
            return self._move()
        if not self._meet():
            return self._move_ahead()
        self.advance()
        return True

    def _prepare(self) -> int:
        """Does what is possible before the message is posted; returns the number of written pieces."""
        return 0

    def _move_ahead(self) -> bool:
        """Does what is possible before the other side has posted the message."""
        return False

    def _move(self) -> bool:
        """Moves a piece, if one can be moved."""
        raise NotImplementedError

    def _meet(self) -> bool:
        """Compares the posts of both sides, if the other side has posted; returns whether it has."""
        words, other = self._words, self._other_line
        if words[other + _NUMBER] < self._number:
            return False
        odd = self._number & 1
        if words[other + _DIGESTS + odd] == self.agreement.digest and words[other + _SIZES + odd] == self._data.size:
            self._has_met = True
            if not self._pieces:
                self._end()
        else:
            self._disagree()
        return True

    def _piece(self, number: int) -> tuple[Array, Array]:
        """Returns a piece of the message and its place in the slots."""
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
        if self.is_over or self._has_met or self._dispute is not None:
            return False
        return self._words[self._other_line + _NUMBER] < self._number

    def withdraw(self) -> None:
        """Withdraws a message that the peer has not posted, and will not post while this rank waits."""
        self._number -= 1
        self._words[self._line + _NUMBER] = self._number
        self._end()

    def _disagree(self) -> None:
        described = self.agreement.described()
        text = described._replace(what=f"{self.verb} {described.what}").to_text(_TEXT_BYTES - 4)
        self._board.write(self._own.place, text.encode())
        self._words[self._line + _DESCRIBED] = self._number
        self._dispute = self._text_of(self._own)  # read back, so that both ranks have the same shortened text

    def _exchange_descriptions(self, dispute: str) -> bool:
        """Reads the other side's description, and waits until that side has read this one's."""
        words, other = self._words, self._other_line
        if self.descriptions is None:
            if words[other + _DESCRIBED] < self._number:
                return False
            self.descriptions = (dispute, self._text_of(self._other))
            words[self._line + _READ] = self._number
        elif words[other + _READ] < self._number:
            return False
        else:
            self._end()
        return True

    def _text_of(self, side: Side) -> str:
        return self._board.read(side.place).decode(errors="replace")


class Outgoing(Transfer):
    """The messages that this rank sends to a peer."""

    verb = "sends"

    def _prepare(self) -> int:
        self._taken = 0
        # The slots are free: no message of this rank is in flight, and after a disagreement no piece is read.
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
        # A receiver that has posted the next message has read all of this one.
        if taken == self._pieces or words[other + _NUMBER] > self._number:
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

    verb = "receives"

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
    """The channels from every rank to every other.

    Args:
        memory: bytes_for(world_size) bytes of shared memory, zero at the start, beginning at a page.
        rank: this rank, as numbered in the communicator.
        world_size: number of ranks.
        barrier: the communicator's barrier.
    """

    def __init__(self, memory: memoryview, rank: int, world_size: int, barrier: SharedBarrier) -> None:
        self._rank = rank
        self._world_size = world_size
        self._barrier = barrier
        self._waiting = barrier.waiting
        lines, texts, slots = np.cumsum(_areas(world_size)).tolist()
        self._words = memory[:lines].cast("Q")
        self._board = TextBoard(memory[lines:texts], _TEXT_BYTES)
        self._slots = np.frombuffer(memory[texts:slots], np.uint8).reshape(world_size, SLOTS, PIECE_BYTES)
        self._outgoing: dict[int, Outgoing] = {}  # by peer; made when first needed
        self._incoming: dict[int, Incoming] = {}

    @staticmethod
    def bytes_for(world_size: int) -> int:
        """Returns the size of the channels' shared memory, in whole pages."""
        return whole_pages(sum(_areas(world_size)))

    def move(self, send: Message | None, receive: Message | None) -> None:
        """Sends a message, receives one, or both at once; returns when the receivers have read everything.

        Args:
            send: the message to the rank `send.peer`. For a message to this rank itself, `receive` is from this rank
                too, with the same size.
            receive: the message from the rank `receive.peer`; its array is writable.

        Raises:
            PlanMismatch: raised on both ranks of a message, if they disagree on it; raised on all ranks, if the other
                rank waits for this one in a collective.
            RankFailed, CollectiveTimeout: as for SharedBarrier.meet; the missing rank is the peer. Two ranks that wait
                for each other, because both send first, get CollectiveTimeout.
        """
        if send is not None and receive is not None and send.peer == self._rank:
            copy_words(send.flat, receive.flat)
            return
        moves: list[tuple[Transfer, Message]] = []
        if receive is not None:  # first, so that a peer can begin while this rank copies its own message
            moves.append((self._incoming.get(receive.peer) or self._open_incoming(receive.peer), receive))
        if send is not None:
            moves.append((self._outgoing.get(send.peer) or self._open_outgoing(send.peer), send))
        transfers = [transfer for transfer, _ in moves]
        for transfer, message in moves:
            transfer.begin(message)
        self._drive(transfers)
        if self._waiting.words[self._waiting.aborted]:  # a rank may have sent a message and then aborted
            self._waiting.look_for_aborts(ANY_ROUND)
        for transfer in transfers:
            if transfer.descriptions is not None:
                self._raise_mismatch(transfer, transfer.descriptions)

    def _drive(self, transfers: Sequence[Transfer]) -> None:
        progress = _Progress(transfers)
        while progress.is_needed():
            if not progress.is_made():
                self._wait(progress)

    def _wait(self, progress: _Progress) -> None:
        look_for_failures = partial(self._waiting.look_for_failures, progress.missing)
        if self._waiting.has_failed():  # checked here because short waits never check while sleeping
            look_for_failures(0.0, ANY_ROUND)
        for _ in range(SPINS):
            if progress.is_made():
                return
        rests = Rests(time.monotonic())
        while not progress.is_made():
            if rests.rest():
                look_for_failures(rests.waited_seconds, ANY_ROUND)
                self._look_for_deadlocks(progress.pending)

    # -- Messages that cannot arrive ---------------------------------------------------------------------------

    def _look_for_deadlocks(self, pending: Sequence[Transfer]) -> None:
        """Raises PlanMismatch if all peers wait for this rank in a collective."""
        # The barrier is checked first, so that posts which the peer made before it are seen. All peers must wait there:
        # a transfer with another peer may still end, and must not be left half done.
        if all(self._barrier.is_ahead(transfer.peer) and transfer.is_awaiting_peer() for transfer in pending):
            self._join_collective(pending)

    def _join_collective(self, barred: Sequence[Transfer]) -> NoReturn:
        agreement = barred[0].agreement
        for transfer in barred:
            transfer.withdraw()
        self._barrier.meet_in_disagreement(agreement)

    def _raise_mismatch(self, transfer: Transfer, descriptions: tuple[str, str]) -> NoReturn:
        ranks = self._waiting.ranks
        both = zip((ranks[self._rank], ranks[transfer.peer]), map(Description.from_text, descriptions), strict=True)
        raise message_mismatch(self._waiting.label, dict(both))

    # -- Memory ------------------------------------------------------------------------------------------------

    def _open_outgoing(self, peer: int) -> Outgoing:
        sender, receiver = self._sides(self._rank, peer)
        outgoing = Outgoing(self._words, self._board, sender, receiver, list(self._slots[self._rank]), peer)
        self._outgoing[peer] = outgoing
        return outgoing

    def _open_incoming(self, peer: int) -> Incoming:
        sender, receiver = self._sides(peer, self._rank)
        incoming = Incoming(self._words, self._board, receiver, sender, list(self._slots[peer]), peer)
        self._incoming[peer] = incoming
        return incoming

    def _sides(self, sender: int, receiver: int) -> tuple[Side, Side]:
        line = 2 * (sender * self._world_size + receiver) * _LINE_WORDS
        return (
            Side(line + _SENDING * _LINE_WORDS, 2 * sender + _SENDING),
            Side(line + _RECEIVING * _LINE_WORDS, 2 * receiver + _RECEIVING),
        )

    def release(self) -> None:
        """Releases the shared memory; the channels cannot be used afterwards."""
        self._outgoing.clear()
        self._incoming.clear()
        del self._slots
        with contextlib.suppress(BufferError):  # if a traceback holds a view, the memory is freed with that view
            self._words.release()
            self._board.release()


def _areas(world_size: int) -> tuple[int, int, int]:
    """Returns the sizes in bytes of the lines of all channels, of the texts, and of the slots."""
    lines = 2 * world_size * world_size * _LINE_WORDS * 8
    return lines, 2 * world_size * _TEXT_BYTES, world_size * SLOTS * PIECE_BYTES


class _Progress:
    """The progress of some transfers.

    Args:
        transfers: the transfers.

    Attributes:
        pending: the transfers that were not over at the last call of `is_needed`.
    """

    __slots__ = ("_is_made", "pending")

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self.pending = transfers
        self._is_made = False

    def is_needed(self) -> bool:
        """Whether a transfer is not over; resets the progress."""
        self.pending = [transfer for transfer in self.pending if not transfer.is_over]
        self._is_made = False
        return bool(self.pending)

    def is_made(self) -> bool:
        """Advances the transfers; returns whether there was any progress since `is_needed`."""
        for transfer in self.pending:
            if transfer.advance():
                self._is_made = True
        return self._is_made

    def missing(self) -> list[int]:
        """Returns the ranks that have not done their part."""
        self.is_made()
        return [transfer.peer for transfer in self.pending if not transfer.is_over]
