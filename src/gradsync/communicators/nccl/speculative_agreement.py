"""Agreement of the ranks on the next collective, by prediction, because NCCL's collectives cannot carry a digest.

In this file an event is a collective, a message or the end of a step. Ranks that have agreed on all earlier events
predict the same next event. A rank launches the predicted event without asking. For any other event the rank first
asks the other ranks, through the rendezvous server, whether their next event is the same. If two ranks have
different next events, at most one of these is the predicted event, so at least one rank asks. If the other rank has
already launched the predicted event, the ranks raise an error, and the communicator is broken for all ranks. In debug
mode a rank asks about every event (`asks_always`).

If all steps of a training loop make the same calls, the ranks ask only in the first steps. If the loop sometimes runs
an evaluation, the prediction is wrong when the evaluation begins and after it has ended, and the ranks ask there.

All ranks of a communicator agree on its collectives. For a message, only the sender and the receiver agree. Each
direction between two ranks has a SpeculativeAgreement of its own, which the two ranks create at the first message in
that direction.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any

from gradsync.communicators.agreement import Agreement, CallSite, Description, mismatch, on_behalf
from gradsync.communicators.failures import FailureMonitor, exchange_descriptions, raise_if_left
from gradsync.errors import PlanMismatch, caller
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.frames import Decision, LaunchedEvent

_CONTEXT_EVENTS = 4  # the number of most recent events from which a rank predicts the next event
_MAX_CONTEXTS = 65_536
_REMEMBERED_EVENTS = 256  # the number of most recent launches that a rank can still describe


class History:
    """Predicts the next event from the agreed events, which are the same on all ranks.

    Attributes:
        expected: the digest of the predicted event. If the 4 most recent events have occurred before in the same order,
            this is the event that followed them the last time. `expected` is None if there is no such event, or if
            this rank has forgotten it.
    """

    def __init__(self) -> None:
        self.expected: int | None = None
        self._next_by_context: dict[tuple[int, ...], int] = {}
        self._context: tuple[int, ...] = ()
        self._breaks = 0

    def append(self, digest: int) -> None:
        """Adds an agreed event."""
        known, context = self._next_by_context, self._context
        if self.expected != digest:
            if len(known) >= _MAX_CONTEXTS:
                known.clear()
            known[context] = digest
        self._context = context = (*context, digest)[-_CONTEXT_EVENTS:]
        self.expected = known.get(context)

    def break_off(self) -> None:
        """Forgets the most recent events, after a disagreement.

        `expected` stays None at least until the ranks have agreed on _CONTEXT_EVENTS more events.
        """
        self._breaks += 1
        self._context = (-self._breaks,)  # different from all digests, which are not negative
        self.expected = None


class SpeculativeAgreement:
    """Lets ranks agree on their next event.

    Either all ranks of a communicator agree on collectives, or two ranks agree on the messages that one of them sends
    to the other.

    Args:
        client: this rank's connection to the rendezvous server; the ranks that agree are `client.world_ranks`.
        group: the communicator's name, the same on all ranks.
        label: this rank's name in errors, e.g. "rank 0/2"; errors name other ranks by their world ranks.
        timeout_seconds: how long a rank that asks waits for the answers of the other ranks.
        failures: the failures that the server reports; read when a rank does not answer.
        raise_if_no_answer: a function that raises RankFailed if a rank that has closed the communicator will not answer
            a question; by default the method raise_if_closed.

    Attributes:
        client: see Args.
        position: the number of the next event.
        asks_always: whether this rank asks about predicted events too; all ranks have the same value.
        was_overtaken: whether this rank has launched an event that another rank did not launch. The first call of
            `overtaken` after the launch returns the error.
    """

    def __init__(
        self,
        client: RendezvousClient,
        group: str,
        label: str,
        timeout_seconds: float,
        failures: FailureMonitor,
        *,
        raise_if_no_answer: Callable[[], None] | None = None,
    ) -> None:
        self.client = client
        self._raise_if_no_answer = raise_if_no_answer or partial(self.raise_if_closed, math.inf)
        self._failures = failures
        self._group = group
        self._label = label
        self._timeout_seconds = timeout_seconds
        self._departures = f"nccl/{group}/closed"
        self._lock = threading.Lock()  # the thread that launches and the connection's thread both write
        self._history = History()
        self.position = 0
        self._asked_at = -1  # the position about which another rank has asked, so that this rank must ask too
        self._launched: deque[Agreement | None] = deque(maxlen=_REMEMBERED_EVENTS)  # None: the ranks agreed by asking
        self.was_overtaken = False
        self.asks_always = False
        # The position of an event that this rank launched, and about which another rank has asked.
        self._overtaken_at: int | None = None
        self._described = -1, ""  # the last such position, and the description that this rank sent
        self._launching_thread = threading.get_ident()
        client.follow(group, self._on_asked)

    def repeats(self, agreement: Agreement) -> bool:
        """Whether an event is the predicted event, so that this rank may launch the event.

        If this method returns True, it has added the event to the history. If this method returns False, this rank must
        ask the other ranks, with `ask`.

        Args:
            agreement: the digest and the description of this rank's event.

        Raises:
            RankFailed, CollectiveTimeout: the server has reported a failure.
            RendezvousError: the server is gone.
        """
        if self._failures.has_failed():
            self._failures.check()
        with self._lock:
            position, digest = self.position, agreement.digest
            if self._history.expected != digest or self.asks_always or self._asked_at == position:
                return False
            self._history.append(digest)
            self._launched.append(agreement)
            self.position = position + 1
            self._launching_thread = threading.get_ident()
        return True

    def ask(self, agreement: Agreement, arriving: tuple[list[object], object] | None = None) -> None:
        """Asks the other ranks about an event, and returns when this rank may launch it.

        Args:
            agreement: the digest and the description of this rank's event.
            arriving: see RendezvousClient.agree.

        Raises:
            PlanMismatch: the ranks have different events at the same position. If the error's attribute `broken` is
                True, the communicator must not be used again.
            RankFailed, CollectiveTimeout: a rank died, closed the communicator, or did not answer.
            RendezvousError: the server is gone.
        """
        position = self.position

        def ask_server(seconds: float) -> Decision:
            digest = agreement.digest
            return self.client.agree(self._group, position, digest, timeout_seconds=seconds, arriving=arriving)

        decision = self._failures.await_answer(ask_server, self._timeout_seconds, self._raise_if_no_answer)
        with self._lock:
            self.position += 1
            self._launched.append(None)
            if decision is Decision.AGREED:
                self._history.append(agreement.digest)
                return
            self._history.break_off()
        raise self._disagreement(position, agreement, broken=decision is Decision.LAUNCHED)

    def overtaken(self) -> PlanMismatch | None:
        """Returns an error, once, if this rank launched an event that another rank did not launch; otherwise None."""
        with self._lock:
            position, self._overtaken_at = self._overtaken_at, None
            launched = None if position is None else self._launched_at(position)
        return None if position is None or launched is None else self._mismatch(position, launched, broken=True)

    def announce_closed(self) -> None:
        """Reports to the server that this rank will close the communicator, and after how many events."""
        self.client.announce_left(self._departures, self.position)

    def raise_if_closed(self, position: float, ranks: Iterable[int] | None = None) -> None:
        """Raises RankFailed if another rank has closed the communicator before the given event.

        Args:
            position: the event's number; math.inf if this rank asks, because a rank that has closed the communicator
                answers no questions.
            ranks: the world ranks to check; None means all other ranks.
        """
        raise_if_left(self.client, self._departures, self._label, position, ranks)

    def close(self) -> None:
        """Stops the answers to other ranks that ask about an event."""
        self.client.unfollow(self._group)

    def _launched_at(self, position: int) -> Agreement | None:
        """Returns the event that this rank launched at an earlier position; None if this rank asked before the launch.

        If the event is too old to be remembered, returns an Agreement that says so.
        """
        age = self.position - position
        return self._launched[-age] if age <= len(self._launched) else _forgotten(position)

    def _on_asked(self, position: int) -> LaunchedEvent | None:
        """Handles another rank's question about the event at a position.

        Returns the event that this rank has launched at this position without asking the other ranks; None if this rank
        has not launched an event there, or has asked.
        """
        with self._lock:
            if position >= self.position:
                self._asked_at = position
                return None
            launched = self._launched_at(position)
            if launched is None:
                return None  # this rank has asked too
            self._overtaken_at = position
            self.was_overtaken = True
            found = caller(self._launching_thread)  # this line is after the call, which has already returned
            site = CallSite("" if found is None else str(found), "launched; by now at")
            self._described = position, launched.described(site).to_text()
            return LaunchedEvent(launched.digest, self._described[1])

    def _disagreement(self, position: int, agreement: Agreement, *, broken: bool) -> PlanMismatch:
        """Returns the error for an event on which the ranks disagree, or that only this rank has launched."""
        began_at = self.client.launched_position(self._group) if broken else None
        if began_at is not None and began_at < position:
            with self._lock:
                position, agreement = began_at, self._launched_at(began_at) or agreement
                self._overtaken_at = None
        return self._mismatch(position, agreement, broken=broken)

    def _mismatch(self, position: int, agreement: Agreement, *, broken: bool) -> PlanMismatch:
        """Exchanges the ranks' descriptions of the event through the server, and returns the error."""
        described_at, text = self._described
        if described_at != position:
            text = agreement.described().to_text()
        descriptions = exchange_descriptions(self.client, self._group, position, text, self.client.world_ranks)
        return mismatch(self._label, agreement, descriptions, broken=broken)


def _forgotten(position: int) -> Agreement:
    return Agreement(0, lambda: Description(f"(event {position}, launched too long ago to be known)"))


#: The sender and the receiver of messages, by their numbers in the communicator; one of them is this rank.
Direction = tuple[int, int]


class NcclAgreements:
    """The SpeculativeAgreement objects of a communicator: one for collectives, and one for each direction of messages.

    Args:
        client: this rank's connection to the rendezvous server; the client's ranks are the communicator's ranks.
        group: the communicator's name, the same on all ranks.
        label: this rank's name in errors.
        timeout_seconds: how long a rank that asks waits for the answers of the other ranks.
        failures: the failures that the server reports; read when a rank does not answer.

    Attributes:
        of_all: the SpeculativeAgreement in which all ranks agree on collectives.
    """

    def __init__(
        self, client: RendezvousClient, group: str, label: str, timeout_seconds: float, failures: FailureMonitor
    ) -> None:
        self._client = client
        self._group = group
        self._label = label
        self._timeout_seconds = timeout_seconds
        self._failures = failures
        self.of_all = SpeculativeAgreement(client, group, label, timeout_seconds, failures)
        self._of_messages: dict[Direction, SpeculativeAgreement] = {}

    def on_messages(self, agreements: Mapping[Direction, Agreement]) -> Iterator[list[Direction]]:
        """Asks about one or two messages, and yields groups of messages that this rank may launch.

        Both ranks of a message get the same answer. The caller launches the messages of a group together, before it
        requests the next group. If the ranks of a message disagree, the method raises the error after the last group,
        because the peer of the other message waits for that message.

        All predicted messages form one group. Every message that was not predicted forms a group of its own. This
        method yields the groups of messages that were not predicted in the order in which the server decides on them.
        This order is the same on all ranks, so ranks do not wait for each other in a circle. This method does not wait
        for the second decision before it yields the first group, because the server may decide on the second group only
        after the other rank has received the first message.

        A rank always asks about its first message to another rank. NCCL connects two ranks in the first NCCL group that
        has a message between them, and both ranks must launch the same messages in that group. Source: NCCL,
        src/transport.cc, ncclTransportP2pSetup.

        Args:
            agreements: for each direction the digest and the description of this rank's message.

        Raises:
            PlanMismatch: this rank and its peer disagree on a message. If the error's attribute `broken` is True, one
                of the two ranks has launched its message already, and the communicator must not be used again.
            RankFailed, CollectiveTimeout: as for SpeculativeAgreement.ask.
        """
        repeated = [direction for direction, each in agreements.items() if self._of(direction).repeats(each)]
        if repeated:
            yield repeated
        mismatch = None
        for direction, error in self._answers({d: each for d, each in agreements.items() if d not in repeated}):
            if error is None:
                yield [direction]
            mismatch = mismatch or error
        if mismatch is not None:
            raise mismatch

    def _answers(self, agreements: Mapping[Direction, Agreement]) -> Iterator[tuple[Direction, PlanMismatch | None]]:
        """Asks about each message on its own thread; yields the answers in the order in which the server sends them.

        An answer has the mismatch, or None if this rank may launch the message. The questions are asked at the same
        time, because other ranks may ask the same questions in a different order.
        """
        if len(agreements) == 1:
            [(direction, agreement)] = agreements.items()
            self._of(direction).ask(agreement)
            yield direction, None
            return
        coming: SimpleQueue[tuple[Direction, BaseException | None]] = SimpleQueue()
        arrivals: list[Any] = []  # in the order of the server's answers; the threads may wake in a different order
        asking = threading.get_ident()

        def ask(direction: Direction, agreement: Agreement) -> None:
            on_behalf.thread = asking
            try:
                self._of(direction).ask(agreement, (arrivals, direction))
                coming.put((direction, None))
            except BaseException as error:
                coming.put((direction, error))

        for question in agreements.items():
            threading.Thread(target=ask, args=question, name="gradsync-nccl-question", daemon=True).start()
        answers: dict[Direction, PlanMismatch | None] = {}
        given = 0
        while given < len(agreements):
            direction, error = coming.get()
            if error is not None and (not isinstance(error, PlanMismatch) or error.broken):
                raise error  # without waiting for the other answer
            answers[direction] = error
            while given < len(arrivals) and arrivals[given] in answers:
                yield arrivals[given], answers[arrivals[given]]
                given += 1

    def always_ask(self) -> None:
        """Makes this rank ask about every later collective and message, even if predicted.

        All ranks must call `always_ask`.
        """
        for agreement in self._all():
            agreement.asks_always = True

    @property
    def were_overtaken(self) -> bool:
        """Whether `overtaken` returns an error now, or has already returned it."""
        return any(agreement.was_overtaken for agreement in self._all())

    def overtaken(self) -> PlanMismatch | None:
        """Returns an error, once, if this rank launched an event that another rank did not launch; otherwise None."""
        for agreement in self._all():
            mismatch = agreement.overtaken()
            if mismatch is not None:
                return mismatch
        return None

    def raise_if_closed(self) -> None:
        """Raises RankFailed if a rank closed the communicator before the last event on which this rank has agreed."""
        for agreement in self._all():
            agreement.raise_if_closed(agreement.position - 1)

    def raise_if_members_closed(self, ranks: Iterable[int]) -> None:
        """Raises RankFailed if one of the given ranks (numbers in the communicator) has closed the communicator."""
        self.of_all.raise_if_closed(math.inf, [self._client.world_ranks[rank] for rank in ranks])

    def announce_closed(self) -> None:
        """Reports to the server that this rank will close the communicator, and after how many events."""
        for agreement in self._all():
            agreement.announce_closed()

    def close(self) -> None:
        """Stops the answers to other ranks that ask about an event."""
        for agreement in self._all():
            agreement.close()
            if agreement is not self.of_all:
                agreement.client.close()

    def _all(self) -> list[SpeculativeAgreement]:
        return [self.of_all, *self._of_messages.values()]

    def _of(self, direction: Direction) -> SpeculativeAgreement:
        found = self._of_messages.get(direction)
        if found is None:
            sender, receiver = direction
            found = self._of_messages[direction] = SpeculativeAgreement(
                self._client.group(direction, f"{self._group}/{sender}-{receiver}"),
                "messages",
                self._label,
                self._timeout_seconds,
                self._failures,
                # A rank that closes the communicator announces this for the collectives. The rank announces this for
                # the messages of a direction only if it has sent or received a message in this direction.
                raise_if_no_answer=partial(self.raise_if_members_closed, direction),
            )
            found.asks_always = self.of_all.asks_always
        return found
