"""A channel: the messages from one rank to another, in shared memory, one after the other.

The sender writes its line and the ring, the receiver writes its line. Each side posts a message: its digest and its
size. If both sides posted the same, the bytes go through the ring, piece by piece, and each side counts the pieces that
it is done with. A message ends for the sender when the receiver has read all of it. So neither side is ever more than
one message ahead. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradsync.communicators.shared_memory.compiled import fence
from gradsync.reduction import Array

# The words of a line of messages. Digests and sizes have two words, for messages of even and odd number: a side that
# has ended a message may begin the next one while the other side still has to compare this one.
NUMBER, MESSAGE_DIGEST, SIZE, DONE, TOLD = 0, 1, 3, 5, 6

#: The pieces of a message that the ring has room for. So the receiver copies one while the sender writes the next.
PIECES = 4
_NOTHING = np.empty(0, np.uint8)


class Channel:
    """One side of a channel.

    Attributes:
        words: the shared memory.
        own, other: the index of the first word of the line of this side, and of the other side.
        ring: the memory for the pieces.
        sends: whether this side is the sender.
        number: the number of the last message that this side has posted.
        data, digest: the bytes of this message, and its digest.
        done: how many pieces this side has written, or read.
        has_agreed: whether both sides have posted the same.
    """

    def __init__(self, words: memoryview, own: int, other: int, ring: Sequence[Array], sends: bool) -> None:
        self.words = words
        self.own = own
        self.other = other
        self.ring = ring
        self.sends = sends
        self.number = self.digest = self.done = 0
        self.data = _NOTHING
        self.has_agreed = False


def post(channel: Channel, data: Array, digest: int) -> None:
    """Posts the next message; the last one must have ended."""
    words, own = channel.words, channel.own
    channel.number, channel.data, channel.digest = channel.number + 1, data, digest
    channel.done, channel.has_agreed = 0, False
    odd = channel.number & 1
    words[own + MESSAGE_DIGEST + odd] = digest
    words[own + SIZE + odd] = data.size
    words[own + DONE] = 0
    fence()
    words[own + NUMBER] = channel.number  # publishes the words above


#: The results of `advance`.
IDLE, MOVED, OVER, DIFFERS = 0, 1, 2, 3


def forget(channel: Channel) -> None:
    """Drops the reference to the bytes of a message that has ended."""
    channel.data = _NOTHING


def advance(channel: Channel) -> int:
    """Moves at most one piece of the posted message, if that is possible now; never waits."""
    words, own, other, data = channel.words, channel.own, channel.other, channel.data
    if not channel.has_agreed and words[other + NUMBER] >= channel.number:
        fence()
        odd = channel.number & 1
        if words[other + MESSAGE_DIGEST + odd] != channel.digest or words[other + SIZE + odd] != data.size:
            return DIFFERS
        channel.has_agreed = True
    piece_bytes = channel.ring[0].size
    pieces = -(-data.size // piece_bytes)
    # How many pieces the other side is done with. Until it has posted the message, its count is of the one before.
    theirs = words[other + DONE] if channel.has_agreed else 0
    fence()  # a count of the next message comes with its number
    if words[other + NUMBER] > channel.number:
        theirs = pieces  # it is done with this message, and has posted the next one
    fence()  # what was counted is there
    done = channel.done
    if done < min(pieces, theirs + PIECES if channel.sends else theirs):
        part = data[done * piece_bytes : (done + 1) * piece_bytes]
        slot = channel.ring[done % PIECES][: part.size]
        if channel.sends:
            slot[...] = part
        else:
            part[...] = slot
        channel.done = done + 1
        fence()
        words[own + DONE] = channel.done  # publishes the piece, or that its place in the ring is free
        return MOVED
    is_over = channel.has_agreed and done == pieces and (not channel.sends or theirs == pieces)
    return OVER if is_over else IDLE
