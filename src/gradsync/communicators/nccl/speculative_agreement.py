"""How ranks agree on what comes next where the collective itself cannot carry a digest: for NCCL.

Ranks that have agreed on everything so far have the same history, and so predict the same next collective from it. A
rank that is about to launch the predicted one launches it without asking. Any other collective is asked about first,
through the rendezvous server. Two ranks that differ cannot both be about to launch the predicted one, so at least one
of them asks, and nothing is launched in error but by a rank that had gone ahead already; that one is told, and the
communicator is then broken for all.

A training loop that repeats itself asks in its first steps only; one that evaluates now and then asks again where it
branches off and where it comes back.

All ranks of a communicator agree on its collectives, two of them on each message: each direction between two ranks has
an agreement of its own, in which the other ranks have no part; it is made when the first message goes that way.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

from gradsync.communicators.agreement import Agreement, Description, mismatch, on_behalf, place_of_caller
from gradsync.communicators.verdicts import Verdicts, raise_if_left
from gradsync.errors import GradsyncError, PlanMismatch, RendezvousTimeout, caller
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.frames import MAX_EVENT_BYTES, Decision, LaunchedEvent, event_key

_CONTEXT_EVENTS = 4  # how many events predict the next one
_MAX_CONTEXTS = 65_536
_REMEMBERED_EVENTS = 256  # how far back a rank can tell what it launched
_PIECE_BYTES = MAX_EVENT_BYTES
TEXTS_WITHIN_SECONDS = 5.0
_ASK_AGAIN_AFTER_SECONDS = 1.0  # when a question makes the rank look whether another one has closed


class History:
    """The agreed past of a communicator, as a predictor; the same on every rank, because only agreed events enter.

    Attributes:
        expected: the digest of the event that followed the last time that the same events came before; None where they
            never did.
    """

    def __init__(self) -> None:
        self.expected: int | None = None
        self._next_by_context: dict[tuple[int, ...], int] = {}
        self._context: tuple[int, ...] = ()
        self._breaks = 0

    def append(self, digest: int) -> None:
        """Enters an agreed event."""
        known, context = self._next_by_context, self._context
        if self.expected != digest:
            if len(known) >= _MAX_CONTEXTS:
                known.clear()
            known[context] = digest
        self._context = context = (*context, digest)[-_CONTEXT_EVENTS:]
        self.expected = known.get(context)

    def break_off(self) -> None:
        """Begins a context that there never was, after an event on which the ranks did not agree.

        Ranks that have just differed are not sure to go on alike: it predicts nothing until they have agreed again.
        """
        self._breaks += 1
        self._context = (-self._breaks,)  # no digest is negative
        self.expected = None


class Agreed(NamedTuple):
    """What a launch was agreed on.

    Attributes:
        agreement: between the ranks that it concerns.
        position: number of the event in it.
        peer: the other rank of a message, as the world counts; None for a collective.
    """

    agreement: SpeculativeAgreement
    position: int
    peer: int | None = None


class SpeculativeAgreement:
    """The agreement of one communicator's ranks.

    Args:
        client: this rank's connection to the rendezvous server, of the ranks that are to agree.
        group: the communicator's name, the same on all ranks.
        label: this rank in messages, e.g. "rank 0/2"; other ranks are called by their numbers in the world.
        timeout_seconds: how long a rank waits for the others' word.
        verdicts: the server's, where a rank does not come.
        peer: the other rank of messages, as the world counts; None for collectives.
        look_for_closed_peer: raises RankFailed where the peer has left that never came to a message.

    Attributes:
        position: number of the next event.
        asks_always: whether it asks about what it predicts too; the same on all ranks.
        was_overtaken: whether this rank has launched what another one did not: `overtaken` then gives the error, once.
    """

    def __init__(
        self,
        client: RendezvousClient,
        group: str,
        label: str,
        timeout_seconds: float,
        verdicts: Verdicts,
        *,
        peer: int | None = None,
        look_for_closed_peer: Callable[[], None] | None = None,
    ) -> None:
        self._client = client
        self._peer = peer
        self._look_for_closed_peer = look_for_closed_peer
        self._verdicts = verdicts
        self._group = group
        self._label = label
        self._timeout_seconds = timeout_seconds
        self._own_rank = client.world_ranks[client.rank]
        self._departures = f"nccl/{group}/closed"
        self._lock = threading.Lock()  # between the thread that launches and the one that hears the server
        self._history = History()
        self.position = 0
        self._asked_at = -1  # where another rank wants everybody to ask
        self._launched: deque[Agreement | None] = deque(maxlen=_REMEMBERED_EVENTS)  # None: agreed on by asking
        self.was_overtaken = False
        self.asks_always = False
        self._overtaken_at: int | None = None  # an event that this rank launched and another one asked about
        self._told = -1, ""  # that event, or an earlier one, and what this rank has told of it
        self._launching_thread = threading.get_ident()
        client.follow(group, self._on_asked)

    def repeated(self, agreement: Agreement) -> Agreed | None:
        """Enters the event where it is the predicted one, without asking: this rank may launch it.

        Args:
            agreement: what this rank believes all ranks are about to do.

        Returns:
            None where it must be asked about: see `asked`.

        Raises:
            RankFailed, CollectiveTimeout: the server's verdict.
        """
        if self._verdicts.is_known():
            self._verdicts.check()
        with self._lock:
            position, digest = self.position, agreement.digest
            if self._history.expected != digest or self.asks_always or self._asked_at == position:
                return None
            self._history.append(digest)
            self._launched.append(agreement)
            self.position = position + 1
            self._launching_thread = threading.get_ident()
        return Agreed(self, position, self._peer)

    def asked(self, agreement: Agreement, arrivals: list[object] | None = None) -> Agreed:
        """Asks about the event; returns once this rank may launch it.

        Args:
            agreement: see `repeated`.
            arrivals: gets this object when the server's decision comes: see RendezvousClient.agree.

        Raises:
            PlanMismatch: the ranks differ; where it is `broken`, the communicator must not be used again.
            RankFailed, CollectiveTimeout: a rank died, left, or did not come.
        """
        position = self.position
        decision = self._ask(position, agreement.digest, arrivals)
        with self._lock:
            self.position += 1
            self._launched.append(None)
            if decision is Decision.AGREED:
                self._history.append(agreement.digest)
                return Agreed(self, position, self._peer)
            self._history.break_off()
        raise self._disagreement(position, agreement, broken=decision is Decision.LAUNCHED)

    def overtaken(self) -> PlanMismatch | None:
        """Returns the error of a rank that launched an event which the others did not; None while there is none."""
        with self._lock:
            position, self._overtaken_at = self._overtaken_at, None
            if position is None:
                return None
            launched = self._launched_at(position)
        return self._mismatch(position, launched, broken=True)

    def announce_closed(self) -> None:
        """Tells the other ranks, should they wait for this one, how far it has come."""
        self._client.announce_left(self._departures, self.position)

    def look_for_closed_ranks(self, position: float, ranks: Iterable[int] | None = None) -> None:
        """Raises RankFailed when another rank has closed the communicator before it had passed this event.

        Args:
            position: of the event.
            ranks: whom to look for, by their numbers in the world; None is all.
        """
        raise_if_left(self._client, self._departures, self._label, position, ranks)
        if position == math.inf and self._look_for_closed_peer is not None:
            self._look_for_closed_peer()  # a question: who has closed the communicator does not answer it

    def close(self) -> None:
        """Stops listening."""
        self._client.unfollow(self._group)

    def _other_ranks(self) -> list[int]:
        """Returns the others' numbers in the world."""
        return [rank for rank in self._client.world_ranks if rank != self._own_rank]

    def _launched_at(self, position: int) -> Agreement | None:
        """Returns what was launched by prediction at a position that lies behind; None for what was asked about."""
        age = self.position - position
        return self._launched[-age] if age <= len(self._launched) else _forgotten(position)

    def _on_asked(self, position: int) -> LaunchedEvent | None:
        """Hears that another rank asks about an event; tells what was launched there, if that has happened."""
        with self._lock:
            if position >= self.position:
                self._asked_at = position
                return None
            launched = self._launched_at(position)
            if launched is None:
                return None  # its question crossed this rank's own
            self._overtaken_at = position
            self.was_overtaken = True
            found = caller(self._launching_thread)  # not the line of the call, which has returned, but one near it
            place = "" if found is None else f"launched; by now at {found}"
            self._told = position, launched.text_for_others(place)
            return LaunchedEvent(launched.digest, self._told[1])

    def _ask(self, position: int, digest: int, arrivals: list[object] | None) -> Decision:
        began = time.monotonic()
        while True:
            left_seconds = max(began + self._timeout_seconds - time.monotonic(), 1e-3)
            try:
                seconds = min(left_seconds, _ASK_AGAIN_AFTER_SECONDS)
                arriving = None if arrivals is None else (arrivals, self)
                return self._client.agree(self._group, position, digest, timeout_seconds=seconds, arriving=arriving)
            except RendezvousTimeout as error:
                self.look_for_closed_ranks(math.inf)  # who has closed answers no more, wherever it had come to
                waited_seconds, missing = time.monotonic() - began, error.missing_ranks or None
                if left_seconds <= _ASK_AGAIN_AFTER_SECONDS:
                    self._verdicts.give_up(waited_seconds, missing)
                self._verdicts.warn(waited_seconds, missing)

    def _disagreement(self, position: int, agreement: Agreement | None, *, broken: bool) -> PlanMismatch:
        """Makes the error for a question; it may be that this rank had gone astray before."""
        began_at = self._client.launched_position(self._group) if broken else None
        if began_at is not None and began_at < position:
            with self._lock:
                position, agreement = began_at, self._launched_at(began_at)
                self._overtaken_at = None
        return self._mismatch(position, agreement, broken=broken)

    def _own_text(self, position: int, agreement: Agreement | None) -> str:
        if self._told[0] == position:
            return self._told[1]
        return f"{place_of_caller()}\n(unknown)" if agreement is None else agreement.text_for_others()

    def _mismatch(self, position: int, agreement: Agreement | None, *, broken: bool) -> PlanMismatch:
        """Exchanges descriptions through the server and makes the error."""
        mine = self._own_text(position, agreement)
        texts = {self._own_rank: mine}
        try:
            self._publish(position, mine)
            for rank in self._other_ranks():
                texts[rank] = self._read(position, rank)
        except GradsyncError as error:  # the mismatch is the news; whose text is missing is told beside it
            for rank in self._other_ranks():
                texts.setdefault(rank, f"\n(not told: {error})")
        return mismatch(self._label, agreement, Description.parse_whole(texts), broken=broken)

    def _publish(self, position: int, text: str) -> None:
        """Sets this rank's text, in pieces; the last one is shorter than the others."""
        data = text.encode(errors="replace")
        for number, begin in enumerate(range(0, len(data) + 1, _PIECE_BYTES)):
            self._client.set(self._piece_key(position, self._own_rank, number), data[begin : begin + _PIECE_BYTES])

    def _read(self, position: int, rank: int) -> str:
        pieces: list[bytes] = []
        while not pieces or len(pieces[-1]) == _PIECE_BYTES:
            key = self._piece_key(position, rank, len(pieces))
            pieces.append(self._client.get(key, timeout_seconds=TEXTS_WITHIN_SECONDS))
        return b"".join(pieces).decode(errors="replace")

    def _piece_key(self, position: int, rank: int, number: int) -> str:
        # The first one is what the server itself sets for a rank that has gone ahead.
        key = event_key(self._group, position, rank)
        return key if number == 0 else f"{key}/{number}"


def _forgotten(position: int) -> Agreement:
    return Agreement(0, lambda: f"(event {position}, launched too long ago to be known)")


class Question(NamedTuple):
    """A message on which this rank and another one are to agree.

    Attributes:
        sender, receiver: as they are numbered in the communicator; one of them is this rank.
        agreement: what this rank believes both are about to do.
    """

    sender: int
    receiver: int
    agreement: Agreement


class Answer(NamedTuple):
    """What has come of a question: what was agreed on, or else why it was not."""

    agreed: Agreed | None
    mismatch: PlanMismatch | None = None


class NcclAgreements:
    """The agreements of one communicator.

    Args:
        client: the way of its ranks to the rendezvous server.
        group: its name, the same on all ranks.
        label: this rank in messages.
        timeout_seconds: how long a rank waits for the others' word.
        verdicts: the server's, where a rank does not come.

    Attributes:
        of_all: of all ranks, on collectives.
    """

    def __init__(
        self, client: RendezvousClient, group: str, label: str, timeout_seconds: float, verdicts: Verdicts
    ) -> None:
        self._client = client
        self._group = group
        self._label = label
        self._timeout_seconds = timeout_seconds
        self._verdicts = verdicts
        self.of_all = SpeculativeAgreement(client, group, label, timeout_seconds, verdicts)
        self._pairs: dict[tuple[int, int], RendezvousClient] = {}
        self._of_messages: dict[tuple[int, int], SpeculativeAgreement] = {}  # by sender and receiver

    def on_messages(self, questions: Sequence[Question]) -> Iterator[dict[Question, Answer]]:
        """Gives, in groups, which of one or two messages this rank may launch; the other rank of each knows the same.

        What comes in one group is launched together, before the next is asked for. What repeats itself is one group.
        What must be asked about is launched by itself, in the order of the server's answers, which is one order for
        all ranks: so no circle of them waits for each other, and a message waits for no answer to another one, which
        may come only when its rank has received it. The first message from a rank to another is always asked about:
        NCCL connects two ranks within the first group that has a message between them, and both need the same ones in
        it. Source: NCCL, src/transport.cc, ncclTransportP2pSetup.

        Raises:
            PlanMismatch: `broken`: the communicator must not be used again.
            RankFailed, CollectiveTimeout: as for SpeculativeAgreement.asked.
        """
        ways = {question: self._of_way(question.sender, question.receiver) for question in questions}
        repeated = {}
        for question, way in ways.items():
            if (agreed := way.repeated(question.agreement)) is not None:
                repeated[question] = Answer(agreed)
        if repeated:
            yield repeated
        asked = [question for question in questions if question not in repeated]
        if len(asked) == 1:
            yield {asked[0]: _ask(ways[asked[0]], asked[0], None)}
        elif asked:
            yield from _ask_at_once({ways[question]: question for question in asked})

    def always_ask(self) -> None:
        """Has every collective and message be asked about from now on, also what repeats itself; on all ranks."""
        for agreement in self._all():
            agreement.asks_always = True

    @property
    def were_overtaken(self) -> bool:
        """Whether `overtaken` gives an error, or has given it."""
        return any(agreement.was_overtaken for agreement in self._all())

    def overtaken(self) -> PlanMismatch | None:
        """Returns the error of a rank that launched what another one did not; None while there is none."""
        for agreement in self._all():
            mismatch = agreement.overtaken()
            if mismatch is not None:
                return mismatch
        return None

    def look_for_closed_ranks(self) -> None:
        """Raises RankFailed when a rank has closed the communicator before it had passed all that this one has."""
        for agreement in self._all():
            agreement.look_for_closed_ranks(agreement.position - 1)

    def look_for_closed_members(self, ranks: Iterable[int]) -> None:
        """Raises RankFailed when one of these ranks, as the communicator numbers them, has closed the communicator."""
        self.of_all.look_for_closed_ranks(math.inf, [self._client.world_ranks[rank] for rank in ranks])

    def announce_closed(self) -> None:
        """Tells the other ranks, should they wait for this one, how far it has come."""
        for agreement in self._all():
            agreement.announce_closed()

    def close(self) -> None:
        """Stops listening."""
        for agreement in self._all():
            agreement.close()
        for client in self._pairs.values():
            client.close()

    def _all(self) -> list[SpeculativeAgreement]:
        return [self.of_all, *self._of_messages.values()]

    def _of_way(self, sender: int, receiver: int) -> SpeculativeAgreement:
        way = self._of_messages.get((sender, receiver))
        if way is None:
            low, high = sorted((sender, receiver))
            pair = self._pairs.get((low, high))
            if pair is None:
                pair = self._pairs[low, high] = self._client.group((low, high), f"{self._group}/{low}-{high}")
            peer = self._client.world_ranks[high if self._client.rank == low else low]
            way = self._of_messages[sender, receiver] = SpeculativeAgreement(
                pair,
                "to the higher" if sender == low else "to the lower",
                self._label,
                self._timeout_seconds,
                self._verdicts,
                peer=peer,
                look_for_closed_peer=partial(self.of_all.look_for_closed_ranks, math.inf, (peer,)),
            )
            way.asks_always = self.of_all.asks_always
        return way


def _ask(way: SpeculativeAgreement, question: Question, arrivals: list[object] | None) -> Answer:
    try:
        return Answer(way.asked(question.agreement, arrivals))
    except PlanMismatch as error:
        if error.broken:
            raise
        return Answer(None, error)


def _ask_at_once(questions: dict[SpeculativeAgreement, Question]) -> Iterator[dict[Question, Answer]]:
    """Asks on threads, because the other ranks may come to the questions in any order; gives the answers in theirs."""
    coming: SimpleQueue[tuple[SpeculativeAgreement, Answer | BaseException]] = SimpleQueue()
    arrivals: list[object] = []  # of the server's answers; a thread may be woken later than another one
    asking = threading.get_ident()

    def ask(way: SpeculativeAgreement, question: Question) -> None:
        on_behalf.thread = asking
        try:
            coming.put((way, _ask(way, question, arrivals)))
        except BaseException as error:  # raised where the answer is taken; another question ends by it too
            coming.put((way, error))

    for way, question in questions.items():
        threading.Thread(target=ask, args=(way, question), name="gradsync-nccl-question", daemon=True).start()
    answers: dict[object, Answer] = {}
    given = 0
    while given < len(questions):
        way, answer = coming.get()
        if isinstance(answer, BaseException):
            raise answer
        answers[way] = answer
        while given < len(arrivals) and (first := arrivals[given]) in answers:
            yield {questions[first]: answers[first]}  # type: ignore[index]
            given += 1
