"""One message between two ranks that share memory, as the sender and as the receiver see it.

Each ordered pair of ranks has two cache lines, one that the sender writes and one that the receiver writes; both read
both. Either posts what it is about to do (a digest, a size, then the number of the message) and compares it with what
the other has posted, so that both come to the same conclusion. The bytes go through the sender's slots, in turn: it
counts what it has written, the receiver what it has taken, and each goes on as far as the other's count lets it.

Neither can be more than one message ahead of the other, because a message ends for the sender when all of it is taken.
That one is enough to overwrite what the slower one still has to compare, so digests and sizes lie in two words each.

A transfer never waits: `advance` does what can be done now, so that one thread can drive two of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradsync.communicators.agreement import place_of_caller
from gradsync.communicators.backend import Message
from gradsync.communicators.host_copy import copy_words
from gradsync.communicators.shared_memory.waiting import TextBoard
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
