"""Messages between the ranks of a shared-memory communicator, each between two of them.

Each ordered pair of ranks has two cache lines, one that the sender writes and one that the receiver writes; both read
both. Either posts what it is about to do (a digest, a size, then the number of the message) and compares it with what
the other has posted, so that both come to the same conclusion. The bytes go through the sender's slots, in turn: it
counts what it has written, the receiver what it has taken, and each goes on as far as the other's count lets it.

Neither can be more than one message ahead of the other, because a message ends for the sender when all of it is taken.
That one is enough to overwrite what the slower one still has to compare, so digests and sizes lie in two words each.

A transfer never waits: `advance` does what can be done now. So one thread drives both directions of a rank at once, and
ranks that exchange in pairs or rings of any size never wait for each other. What a rank waits for is watched: for
failures as at the barrier, and for what cannot come because the other rank is in a collective.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import numpy as np

from gradsync.communicators.agreement import Description, message_mismatch, place_of_caller
from gradsync.communicators.backend import Message
from gradsync.communicators.host_copy import copy_words
from gradsync.communicators.shared_memory.barrier import ANY_ROUND, SPINS, Rests, SharedBarrier, TextBoard
from gradsync.communicators.shared_memory.segment import whole_pages
from gradsync.reduction import Array

# Words of a line, of which there are eight.
_NUMBER = 0  # of the last message that this side has posted
_DIGESTS = 1  # two words, for messages of even and odd number
_SIZES = 3  # likewise
_PROGRESS = 5  # pieces of the message that were written, or taken
_TOLD = 6  # number of the last message on which this side has written its description for the other
_HEARD = 7  # number of the last one on which it has read the other's

# What is in flight. Measured: smaller pieces cost more calls, larger ones let the receiver begin later.
PIECE_BYTES = 128 * 1024
SLOTS = 4

_LINE_WORDS = 8
_TEXT_BYTES = 4096  # description of a message, for PlanMismatch
_SENDING, _RECEIVING = 0, 1  # the two texts, and the two lines, of a rank and a peer

_NOTHING = np.empty(0, np.uint8)


class Side:
    """Where one side of a channel writes.

    Args:
        line: index of its line's first word.
        place: of its text on the board.
    """

    __slots__ = ("line", "place")

    def __init__(self, line: int, place: int) -> None:
        self.line = line
        self.place = place


class Transfer:
    """The messages of one direction between this rank and a peer, one after the other.

    Args:
        words: the lines of all channels.
        board: the descriptions of the ranks that disagree.
        own: this rank's side.
        other: the peer's.
        slots: the sender's.
        peer: the other rank, as it is numbered in the communicator.

    Attributes:
        peer: see above.
        is_over: whether the last message was moved, or both sides know that it cannot be.
        descriptions: what this rank and the peer were about to do, where that did not fit.
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
        self._dispute: str | None = None  # what this rank was about to do, as long as the message does not fit

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
        words[line + _NUMBER] = number  # publishes all that was written before

    def advance(self) -> bool:
        """Does what can be done now; returns whether anything was, or there is nothing left to do."""
        if self.is_over:
            return True
        if self._dispute is not None:
            return self._settle(self._dispute)
        if self._has_met:
            return self._move()
        if not self._meet():
            return self._move_ahead()
        self.advance()
        return True

    def _prepare(self) -> int:
        """Does what can be done before the message is posted; returns the progress."""
        return 0

    def _move_ahead(self) -> bool:
        """Does what can be done before the other side has posted the message."""
        return False

    def _move(self) -> bool:
        """Moves a piece, if one can be moved."""
        raise NotImplementedError

    def _meet(self) -> bool:
        """Compares what both sides have posted, once they have."""
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
        self._data = _NOTHING  # the caller's array is not kept alive

    # -- When it does not fit ----------------------------------------------------------------------------------

    def is_awaiting_peer(self) -> bool:
        """Whether the peer has yet to post this message."""
        if self.is_over or self._has_met or self._dispute is not None:
            return False
        return self._words[self._other_line + _NUMBER] < self._number

    def withdraw(self) -> None:
        """Takes back a message that the peer has not posted, and will not before this rank does something else."""
        self._number -= 1
        self._words[self._line + _NUMBER] = self._number
        self._end()

    def _disagree(self) -> None:
        text = f"{place_of_caller()}\n{self.verb} {self.agreement.describe()}"
        self._board.write(self._own.place, text.encode(errors="backslashreplace"))
        self._words[self._line + _TOLD] = self._number
        self._dispute = self._text_of(self._own)  # read back: as short as the peer reads it

    def _settle(self, dispute: str) -> bool:
        """Reads the other's description; it may write the next one once this rank tells that it has."""
        words, other = self._words, self._other_line
        if self.descriptions is None:
            if words[other + _TOLD] < self._number:
                return False
            self.descriptions = (dispute, self._text_of(self._other))
            words[self._line + _HEARD] = self._number
        elif words[other + _HEARD] < self._number:
            return False
        else:
            self._end()
        return True

    def _text_of(self, side: Side) -> str:
        return self._board.read(side.place).decode(errors="replace")


class Outgoing(Transfer):
    """What this rank sends to a peer."""

    verb = "sends"

    def _prepare(self) -> int:
        self._taken = 0
        # The slots are free: nothing of this rank is on its way, and where ranks disagreed, nothing is taken.
        if self._pieces:
            self._write()
        return self._done

    def _move_ahead(self) -> bool:
        if self._done == min(self._pieces, SLOTS):
            return False
        self._write_and_tell()
        return True

    def _move(self) -> bool:
        words, other = self._words, self._other_line
        taken = words[other + _PROGRESS]
        # A receiver that has gone on to the next message has taken all of this one.
        if taken == self._pieces or words[other + _NUMBER] > self._number:
            self._end()
        elif self._done < self._pieces and self._done - taken < SLOTS:
            self._write_and_tell()
        elif taken == self._taken:
            return False
        self._taken = taken
        return True

    def _write_and_tell(self) -> None:
        self._write()
        self._words[self._line + _PROGRESS] = self._done

    def _write(self) -> None:
        copy_words(*self._piece(self._done))
        self._done += 1


class Incoming(Transfer):
    """What this rank receives from a peer."""

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


class SharedChannels:
    """The way from every rank to every other.

    Args:
        memory: bytes_for(world_size) bytes of shared memory, zero at the start, on a page of its own.
        rank: this rank, as it is numbered in the communicator.
        world_size: number of ranks.
        barrier: where the same ranks meet for collectives.
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
        """Returns how much memory the channels of that many ranks share, in whole pages."""
        return whole_pages(sum(_areas(world_size)))

    def move(self, send: Message | None, receive: Message | None) -> None:
        """Sends a message, receives one, or both at once; returns when the receivers have all.

        Args:
            send: goes to the rank `send.peer`. To this rank itself: `receive` comes from here too, of the same size.
            receive: comes from the rank `receive.peer`; its array can be written to.

        Raises:
            PlanMismatch: on both ranks of a message, when they disagree on it; on all ranks, when the other one waits
                for this one in a collective.
            RankFailed, CollectiveTimeout: as for SharedBarrier.meet; who is missing is the peer. So end two ranks that
                wait for each other, as both send first.
        """
        if send is not None and receive is not None and send.peer == self._rank:
            copy_words(send.flat, receive.flat)
            return
        moves: list[tuple[Transfer, Message]] = []
        if receive is not None:  # first: a peer may begin while this rank copies what it sends
            moves.append((self._incoming.get(receive.peer) or self._open_incoming(receive.peer), receive))
        if send is not None:
            moves.append((self._outgoing.get(send.peer) or self._open_outgoing(send.peer), send))
        transfers = [transfer for transfer, _ in moves]
        for transfer, message in moves:
            transfer.begin(message)
        self._drive(transfers)
        if self._waiting.words[self._waiting.aborted]:  # what a rank left that has given up is no success
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
        if self._waiting.has_failed():  # heard of by another thread; where nobody waits for long, nobody looks
            look_for_failures(0.0, ANY_ROUND)
        for _ in range(SPINS):
            if progress.is_made():
                return
        rests = Rests(time.monotonic())
        while not progress.is_made():
            if rests.rest():
                look_for_failures(rests.waited_seconds, ANY_ROUND)
                self._look_for_deadlocks(progress.pending)

    # -- What cannot come --------------------------------------------------------------------------------------

    def _look_for_deadlocks(self, pending: Sequence[Transfer]) -> None:
        """Gives up where all the peers wait for this rank in a collective; one that may only be late is waited for."""
        # In this order: what the peer did before it came to where it waits is seen then. And of all, or of none: others
        # may still end. Who was left alone in the middle of one would not know how far it came.
        if all(self._barrier.is_ahead(transfer.peer) and transfer.is_awaiting_peer() for transfer in pending):
            self._join_collective(pending)

    def _join_collective(self, barred: Sequence[Transfer]) -> NoReturn:
        agreement = barred[0].agreement
        for transfer in barred:
            transfer.withdraw()
        self._barrier.meet_in_disagreement(agreement)

    def _raise_mismatch(self, transfer: Transfer, descriptions: tuple[str, str]) -> NoReturn:
        ranks = self._waiting.ranks
        both = zip((ranks[self._rank], ranks[transfer.peer]), map(Description.parse, descriptions), strict=True)
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
        """Lets go of the shared memory; the channels cannot be used afterwards."""
        self._outgoing.clear()
        self._incoming.clear()
        del self._slots
        with contextlib.suppress(BufferError):  # where a traceback still holds a view, it goes with the last one
            self._words.release()
            self._board.release()


def _areas(world_size: int) -> tuple[int, int, int]:
    """Returns the bytes of the lines of all channels, of the texts, and of the slots."""
    lines = 2 * world_size * world_size * _LINE_WORDS * 8
    return lines, 2 * world_size * _TEXT_BYTES, world_size * SLOTS * PIECE_BYTES


class _Progress:
    """Whether any of some transfers gets on, whoever looks.

    Args:
        transfers: these.

    Attributes:
        pending: those that were not over when it was last begun to wait for one.
    """

    __slots__ = ("_is_made", "pending")

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self.pending = transfers
        self._is_made = False

    def is_needed(self) -> bool:
        """Whether any is not over; from here on, what was done before no longer counts."""
        self.pending = [transfer for transfer in self.pending if not transfer.is_over]
        self._is_made = False
        return bool(self.pending)

    def is_made(self) -> bool:
        """Does what can be done now; returns whether anything was."""
        for transfer in self.pending:
            if transfer.advance():
                self._is_made = True
        return self._is_made

    def missing(self) -> list[int]:
        """Returns the ranks that have not done their part."""
        self.is_made()
        return [transfer.peer for transfer in self.pending if not transfer.is_over]
