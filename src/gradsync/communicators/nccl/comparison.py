"""Compares each collective and message through the rendezvous server before it is launched.

NCCL's collectives cannot carry a digest. So the ranks first exchange digest and layout through the server. If they
differ, nothing is launched, and the communicator stays usable. All ranks compare a collective; its sender and its
receiver compare a message.

The order of the server's answers is the same on all ranks, so it is the order in which they launch, also where a
collective of one communicator comes after a message of another. Otherwise two ranks might wait for each other: a GPU
runs the launches one after the other, and NCCL blocks the host at the first contact of two ranks until the other one
launches the message too. Source: NCCL, src/transport.cc, ncclTransportP2pSetup.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from gradsync.communicators.agreement import Agreement, LayoutsDiffer, on_behalf
from gradsync.communicators.backend import Message
from gradsync.communicators.failures import FailureMonitor, exchange_mismatch, raise_if_left
from gradsync.errors import CommunicatorClosed, PlanMismatch, RendezvousTimeout
from gradsync.machine import Latch
from gradsync.rendezvous.client import RendezvousClient

_ASK_AGAIN_AFTER_SECONDS = 1.0  # then a message asks whether its other rank has closed the communicator


class Question:
    """One comparison that has begun.

    Attributes:
        comparison: where it was begun.
        agreement: what is compared.
        message: the message, or None for a collective.
        is_sent: whether this rank sends the message.
        thread: the thread that began it.
        error: what the comparison has found; None if the ranks agree.
        is_over: set when that is known.
    """

    def __init__(
        self,
        comparison: Comparison,
        agreement: Agreement,
        message: Message | None = None,
        settle: Callable[[Question], None] | None = None,
        *,
        is_sent: bool = False,
    ) -> None:
        self.comparison = comparison
        self.agreement = agreement
        self.message = message
        self.is_sent = is_sent
        self.thread = threading.get_ident()
        self.error: BaseException | None = None
        self.is_over = Latch()
        self._settle = None if settle is None else weakref.WeakMethod(settle)  # an open message keeps no communicator

    def settle(self) -> None:
        """Launches the message, or ends it if its two ranks disagree."""
        settle = None if self._settle is None else self._settle()
        if settle is not None:
            settle(self)


# The answered questions of all communicators of this process, in the order of the answers: the connection adds them,
# before it wakes their threads.
_arrivals: list[Any] = []


class Comparison:
    """Compares the collectives and messages of one communicator. One thread at a time may use it.

    Args:
        client: this rank's connection to the rendezvous server; the client's ranks are the communicator's ranks.
        group: the communicator's name, the same on all ranks.
        label: this rank's name in errors; errors name other ranks by their world ranks.
        timeout_seconds: how long a rank waits for the other ranks of a collective.
        failures: the failures that the server reports.
    """

    def __init__(
        self, client: RendezvousClient, group: str, label: str, timeout_seconds: float, failures: FailureMonitor
    ) -> None:
        self._client = client
        self._group = group
        self._label = label
        self._timeout_seconds = timeout_seconds
        self._failures = failures
        self._departures = f"nccl/{group}/closed"
        self._ways: dict[tuple[int, int], RendezvousClient] = {}  # for messages, by sender and receiver
        self._counts: dict[str, int] = {}  # of the questions so far, by the name of the client
        self._unsettled = 0  # questions that have begun and that `take` has not returned
        self._ended: SimpleQueue[Question] = SimpleQueue()
        self._is_closed = False

    def begin(self, agreement: Agreement) -> Question:
        """Begins to compare a collective. `take` returns its question when all ranks have come."""
        return self._begin(Question(self, agreement), self._client)

    def begin_message(self, message: Message, settle: Callable[[Question], None], *, is_sent: bool) -> None:
        """Begins to compare a message with its other rank; does not wait.

        Args:
            message: the message.
            settle: what is called in the message's turn; see Question.settle.
            is_sent: whether this rank sends it.
        """
        mine = self._client.rank
        way = (mine, message.peer) if is_sent else (message.peer, mine)
        if way not in self._ways:
            self._ways[way] = self._client.group(way, "{}/{}-{}".format(self._group, *way))
        self._begin(Question(self, message.agreement, message, settle, is_sent=is_sent), self._ways[way])

    def take(self, seconds: float | None) -> Question | None:
        """Returns the next answered question, in the order of the answers; None if there is none after `seconds`.

        It may be a message of another communicator: one that this thread has begun, too.

        Args:
            seconds: how long to wait; None: without a limit, since the question of a collective has a deadline.

        Raises:
            RankFailed, CollectiveTimeout, RendezvousError, ...: a comparison has failed.
        """
        while True:
            with suppress(Empty):
                while True:
                    _raise_failure(self._ended.get_nowait())
            first = self._first()
            if first is not None:
                break
            try:
                _raise_failure(self._ended.get(seconds != 0, seconds))
            except Empty:
                return None
        first.is_over.wait()  # its thread is about to wake, or gets the descriptions of the other ranks
        _arrivals.remove(first)
        first.comparison._unsettled -= 1
        return first

    def _first(self) -> Question | None:
        for question in _arrivals.copy():
            if question.comparison._is_closed:
                _arrivals.remove(question)
            elif question.comparison is self or (question.message and question.thread == threading.get_ident()):
                first: Question = question
                return first
        return None

    def announce_closed(self) -> None:
        """Tells the server that this rank has closed the communicator, and takes part in no later comparison."""
        self._client.announce_left(self._departures, 0)

    def raise_if_closed(self, ranks: Iterable[int] | None = None) -> None:
        """Raises RankFailed if one of the given ranks (numbers in the communicator; None: any) has closed it."""
        needed = None if ranks is None else [self._client.world_ranks[rank] for rank in ranks]
        raise_if_left(self._client, self._departures, self._label, math.inf, needed)

    def close(self) -> None:
        """Ends the comparisons of messages."""
        self._is_closed = True
        for client in self._ways.values():
            client.close()

    def _begin(self, question: Question, client: RendezvousClient) -> Question:
        number = self._counts[client.name] = self._counts.get(client.name, 0) + 1
        self._unsettled += 1
        ask = partial(self._ask, question, client, number)
        if question.message is None and self._unsettled == 1:
            ask()
        else:  # beside this thread, which moves messages on meanwhile
            threading.Thread(target=ask, name="gradsync-nccl-comparison", daemon=True).start()
        return question

    def _ask(self, question: Question, client: RendezvousClient, number: int) -> None:
        """Compares, and then gives the question to `take`."""
        before, on_behalf.thread = on_behalf.thread, question.thread
        try:
            question.error = self._compare(question, client, number)
        except BaseException as error:
            question.error = error
        on_behalf.thread = before
        question.is_over.set()
        self._ended.put(question)

    def _compare(self, question: Question, client: RendezvousClient, number: int) -> BaseException | None:
        """Returns what the ranks disagree on, or None."""
        agreement, message = question.agreement, question.message
        value = agreement.digest.to_bytes(8, "little") + agreement.layout.to_bytes(8, "little")
        name = f"{self._group if message is None else 'messages'}/compared/{number}"

        def exchange(seconds: float) -> list[bytes]:
            return client.exchange(name, value, timeout_seconds=seconds, arriving=(_arrivals, question))

        if message is None:
            values = self._failures.await_answer(exchange, self._timeout_seconds, self.raise_if_closed)
        else:
            values = self._await_peer(exchange, message.peer)
        if len({each[:8] for each in values}) > 1:
            # A name of its own for each message: the descriptions of the next one would replace those of this one.
            group = self._group if message is None else f"messages/{number}"
            return exchange_mismatch(client, group, number, self._label, agreement, client.world_ranks)
        return None if len(set(values)) == 1 else LayoutsDiffer()

    def _await_peer(self, exchange: Any, peer: int) -> list[bytes]:
        """Waits for the other rank of a message, without a deadline: who waits for the message has one."""
        while True:
            try:
                values: list[bytes] = exchange(_ASK_AGAIN_AFTER_SECONDS)
                return values
            except RendezvousTimeout:
                if self._is_closed:
                    raise CommunicatorClosed(f"{self._label}: the communicator was closed before a message") from None
                self.raise_if_closed([peer])


def _raise_failure(question: Question) -> None:
    if question.error is not None and not isinstance(question.error, (PlanMismatch, LayoutsDiffer)):
        raise question.error
