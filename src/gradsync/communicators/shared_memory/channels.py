"""Messages between the ranks of a shared-memory communicator, each between two of them.

What a message is for its sender and its receiver, transfer.py says; here both directions of a rank are driven
at once, so that ranks that exchange in pairs or rings of any size never wait for each other, and what a rank waits for
is watched: for failures as at the barrier, and for what cannot come because the other rank is in a collective.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import numpy as np

from gradsync.communicators.agreement import Description, message_mismatch
from gradsync.communicators.backend import Message
from gradsync.communicators.host_copy import copy_words
from gradsync.communicators.shared_memory.barrier import SharedBarrier
from gradsync.communicators.shared_memory.pages import whole_pages
from gradsync.communicators.shared_memory.transfer import PIECE_BYTES, SLOTS, Incoming, Outgoing, Side, Transfer
from gradsync.communicators.shared_memory.waiting import ANY_ROUND, SPINS, Rests, TextBoard

_LINE_WORDS = 8
_TEXT_BYTES = 4096  # description of a message, for PlanMismatch
_SENDING, _RECEIVING = 0, 1  # the two texts, and the two lines, of a rank and a peer


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
        if self._waiting.is_verdict_known():  # heard of by another thread; where nobody waits for long, nobody looks
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
