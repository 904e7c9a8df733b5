"""Messages between two ranks over MPI.

Both ends of a message first greet each other with what they believe it to be; only where they agree does it travel. So
a send returns when the receiver has come, and ranks that differ both know it before anything is written. A rank whose
peer waits for it in a collective is told, and joins that collective in disagreement. Both halves of an exchange get on
by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from gradsync.communicators.agreement import Agreement, Description, message_mismatch
from gradsync.communicators.backend import Message
from gradsync.communicators.host_copy import copy_words
from gradsync.communicators.mpi.transport import (
    TAG_BARRED_RECEIVER,
    TAG_BARRED_SENDER,
    TAG_DATA,
    TAG_HELLO_OF_RECEIVER,
    TAG_HELLO_OF_SENDER,
    TAG_TEXT,
    MpiTransport,
)
from gradsync.communicators.mpi.waiting import Wait
from gradsync.reduction import Array

_TEXT_BYTES = 4096  # description of a message, for PlanMismatch

# What a greeting says: what the message is believed to be, and how many collectives the rank that greets has begun.
_DIGEST, _BEGUN = range(2)
_HELLO_WORDS = 2

# Which notice bars the greeting of which tag.
_BARRED = {TAG_HELLO_OF_SENDER: TAG_BARRED_SENDER, TAG_HELLO_OF_RECEIVER: TAG_BARRED_RECEIVER}

# (peer, tag) -> a greeting that was taken out of MPI's queue before the message that it belongs to was begun here.
_Early = dict[tuple[int, int], Array]


class MpiMessages:
    """The messages of one rank.

    Args:
        transport: this rank's.
        ranks: the numbers of all ranks in the world.
        label: this rank in errors.
        agree: agrees with all ranks on a collective.
    """

    def __init__(
        self, transport: MpiTransport, ranks: tuple[int, ...], label: str, agree: Callable[[Agreement], None]
    ) -> None:
        self._transport = transport
        self._ranks = ranks
        self._label = label
        self._agree = agree
        self._early: _Early = {}

    def move(self, send: Message | None, receive: Message | None) -> None:
        """Sends a message, receives one, or both at once; returns when both have ended.

        Raises:
            PlanMismatch: on both ranks of a message, when they disagree on it; on all ranks, when the peer waits for
                this one in a collective.
            RankFailed, CollectiveTimeout: the peer died, has closed the communicator, or did not come; or waits for
                this one, as both send first.
        """
        if send is not None and receive is not None and send.peer == self._transport.rank:
            copy_words(send.flat, receive.flat)
            return
        requests: list[Any] = []  # one list: should the wait be given up, all of it is kept
        halves = [
            _Half(self._transport, self._early, message, requests, is_sending=is_sending)
            for message, is_sending in ((receive, False), (send, True))
            if message is not None
        ]

        def awaited() -> list[int]:
            return [half.peer for half in halves if not half.advance()]

        def unheard() -> list[int]:
            return [half.peer for half in halves if not half.is_greeted]

        def is_done() -> bool:
            return not awaited()

        self._transport.waiting.until(Wait(is_done, requests, halves, awaited, unheard))
        for half in halves:
            if half.is_barred:
                self._agree(half.agreement)  # they cannot
        for half in halves:
            if half.theirs is not None:
                self._raise_mismatch(half, half.theirs)

    def bar_waiting_peers(self) -> None:
        """Tells ranks that greet this one, which is in a collective, that it will not come to their messages.

        But for those that were in this collective too, and have left it before this one.
        """
        comm, mpi = self._transport.comm, self._transport.mpi
        for greeting, notice in _BARRED.items():
            while comm.Iprobe(mpi.ANY_SOURCE, greeting, status := mpi.Status()):
                peer = status.Get_source()
                hello = self._transport.take(peer, greeting, _HELLO_WORDS)
                if hello[_BEGUN] >= self._transport.waiting.begun:
                    self._early[peer, greeting] = hello
                else:
                    comm.Isend(np.zeros(0, np.uint64), peer, notice).Free()  # of no bytes: nothing has to stay

    def _raise_mismatch(self, half: _Half, theirs: str) -> NoReturn:
        own, other = self._ranks[self._transport.rank], self._ranks[half.peer]
        descriptions = {own: Description.parse(half.text), other: Description.parse(theirs)}
        raise message_mismatch(self._label, descriptions)


class _Half:
    """One direction of what a rank does in send, recv or exchange.

    Args:
        transport: this rank's.
        early: greetings that have come too early, of all messages.
        message: what is to be sent, or room for what comes.
        requests: gets all of MPI's that it begins.
        is_sending: which of the two.

    Attributes:
        peer: the other rank.
        agreement: what this rank believes the message to be.
        text: the same for the peer, where the two differ.
        theirs: what the peer was about to do, where that differs.
        is_barred: whether the peer waits for this rank in a collective.
    """

    def __init__(
        self,
        transport: MpiTransport,
        early: _Early,
        message: Message,
        requests: list[Any],
        *,
        is_sending: bool,
    ) -> None:
        self._transport = transport
        self._early = early
        self._message = message
        self._requests = requests
        self._is_sending = is_sending
        self.peer = message.peer
        self.agreement = message.agreement
        self.text = ""
        self.theirs: str | None = None
        self.is_barred = False
        tags = TAG_HELLO_OF_SENDER, TAG_HELLO_OF_RECEIVER
        self._own_tag, self._other_tag = tags if is_sending else tags[::-1]
        self._texts: tuple[Array, Array] | None = None
        self._is_over = False
        self._greet()

    def _greet(self) -> None:
        comm, peer = self._transport.comm, self.peer
        begun = self._transport.waiting.begun
        self._mine = np.array([self.agreement.digest, begun], np.uint64)
        self._greeting = comm.Isend(self._mine, peer, self._own_tag)
        self._requests.append(self._greeting)
        self._last_step: list[Any] | None = None  # requests of what follows the greetings
        self._hearing: Any = None
        early = self._early.pop((peer, self._other_tag), None)
        if early is not None:
            self._theirs_is(early)
            return
        self._hello = np.zeros(_HELLO_WORDS, np.uint64)
        self._hearing = comm.Irecv(self._hello, peer, self._other_tag)
        self._requests.append(self._hearing)

    @property
    def is_greeted(self) -> bool:
        """Whether the peer has come: then it does its part before it can close anything."""
        return self._last_step is not None

    def advance(self) -> bool:
        """Does what can be done now; returns whether it is over."""
        if self._is_over:
            return True
        if self._last_step is None:
            if self._hearing.Test():
                self._theirs_is(self._hello)
            else:
                self._look_for_notice()
        if self._last_step is None or not self._transport.mpi.Request.Testall([self._greeting, *self._last_step]):
            return False
        if self._texts is not None:
            self.theirs = self._texts[1].tobytes().rstrip(b"\0").decode(errors="replace")
        self._is_over = True
        return True

    def _theirs_is(self, hello: Array) -> None:
        """Goes on after the peer's greeting."""
        if int(hello[_DIGEST]) != self.agreement.digest:
            self._exchange_texts()
            return
        part = [(self.peer, self._message.flat)]
        self._begin(*((part, []) if self._is_sending else ([], part)), TAG_DATA)

    def _exchange_texts(self) -> None:
        text = self.agreement.text_for_others().encode(errors="replace")[:_TEXT_BYTES]
        self.text = text.decode(errors="replace")  # as short as the peer reads it
        mine, theirs = np.zeros(_TEXT_BYTES, np.uint8), np.zeros(_TEXT_BYTES, np.uint8)
        mine[: len(text)] = np.frombuffer(text, np.uint8)
        self._texts = mine, theirs
        self._begin([(self.peer, mine)], [(self.peer, theirs)], TAG_TEXT)

    def _begin(self, sends: list[tuple[int, Array]], receives: list[tuple[int, Array]], tag: int) -> None:
        self._last_step = self._transport.post(sends, receives, tag)
        self._requests += self._last_step

    def _look_for_notice(self) -> None:
        """Finds out whether the peer waits for this rank in a collective."""
        notice = _BARRED[self._own_tag]
        if self._transport.comm.Iprobe(self.peer, notice):
            self._transport.take(self.peer, notice, 0)
            self._hearing.Cancel()
            self._hearing.Wait()
            self.is_barred = True
            self._last_step = []
