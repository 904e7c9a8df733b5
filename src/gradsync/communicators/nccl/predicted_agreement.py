"""How ranks agree on the next collective where the collective itself cannot carry a digest: for NCCL.

Ranks that have agreed on everything so far have the same history, and so predict the same next collective from it. A
rank that is about to launch the predicted one launches it without asking. Any other collective is asked about first,
through the rendezvous server. Two ranks that differ cannot both be about to launch the predicted one, so at least one
of them asks, and nothing is launched in error but by a rank that had gone ahead already; that one is told, and the
communicator is then broken for all.

A training loop that repeats itself asks in its first steps only; one that evaluates now and then asks again where it
branches off and where it comes back.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterable

from gradsync.communicators.agreement import Agreement, Description, mismatch, place_of_caller
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
    """The agreed past of a communicator, as a predictor; the same on every rank, because only agreed events enter."""

    def __init__(self) -> None:
        self._next_by_context: dict[tuple[int, ...], int] = {}
        self._context: tuple[int, ...] = ()
        self._breaks = 0

    def predicts(self, digest: int) -> bool:
        """Whether this event followed the last time that the same events came before."""
        return self._next_by_context.get(self._context) == digest

    def append(self, digest: int) -> None:
        """Enters an agreed event."""
        if len(self._next_by_context) >= _MAX_CONTEXTS:
            self._next_by_context.clear()
        self._next_by_context[self._context] = digest
        self._context = (*self._context, digest)[-_CONTEXT_EVENTS:]

    def break_off(self) -> None:
        """Begins a context that there never was, after an event on which the ranks did not agree.

        Ranks that have just differed are not sure to go on alike: it predicts nothing until they have agreed again.
        """
        self._breaks += 1
        self._context = (-self._breaks,)  # no digest is negative


class PredictedAgreement:
    """The agreement of one communicator's ranks.

    Args:
        client: this rank's connection to the rendezvous server, of the ranks that are to agree.
        group: the communicator's name, the same on all ranks.
        label: this rank in messages, e.g. "rank 0/2"; other ranks are called by their numbers in the world.
        timeout_seconds: how long a rank waits for the others' word.
        verdicts: the server's, where a rank does not come.

    Attributes:
        asks_always: whether it asks about what it predicts too; the same on all ranks.
        was_overtaken: whether this rank has launched what another one did not: `overtaken` then gives the error, once.
    """

    def __init__(
        self, client: RendezvousClient, group: str, label: str, timeout_seconds: float, verdicts: Verdicts
    ) -> None:
        self._client = client
        self._verdicts = verdicts
        self._group = group
        self._label = label
        self._timeout_seconds = timeout_seconds
        self._own_rank = client.world_ranks[client.rank]
        self._departures = f"nccl/{group}/closed"
        self._lock = threading.Lock()  # between the thread that launches and the one that hears the server
        self._history = History()
        self._position = 0  # of the next event
        self._asked_at = -1  # where another rank wants everybody to ask
        self._launched: deque[Agreement | None] = deque(maxlen=_REMEMBERED_EVENTS)  # None: agreed on by asking
        self.was_overtaken = False
        self.asks_always = False
        self._overtaken_at: int | None = None  # an event that this rank launched and another one asked about
        self._told = -1, ""  # that event, or an earlier one, and what this rank has told of it
        self._launching_thread = threading.get_ident()
        client.follow(group, self._on_asked)

    @property
    def position(self) -> int:
        """Number of the next event."""
        return self._position

    def next(self, agreement: Agreement) -> None:
        """Returns once this rank may launch the event.

        Args:
            agreement: what this rank believes all ranks are about to do.

        Raises:
            PlanMismatch: the ranks differ; where it is `broken`, the communicator must not be used again.
            RankFailed, CollectiveTimeout: a rank died, left, or did not come.
        """
        if self.repeats(agreement):
            return
        position = self._position
        decision = self._ask(position, agreement.digest)
        if decision is Decision.AGREED:
            with self._lock:
                self._advance(agreement.digest, None)
            return
        with self._lock:
            self._position += 1
            self._launched.append(None)
            self._history.break_off()
        raise self._disagreement(position, agreement, broken=decision is Decision.LAUNCHED)

    def repeats(self, agreement: Agreement) -> bool:
        """Enters the event where it is the predicted one, without asking; returns whether it was.

        Raises:
            RankFailed, CollectiveTimeout: as for `next`.
        """
        self._verdicts.check()
        with self._lock:
            if self.asks_always or self._asked_at == self._position or not self._history.predicts(agreement.digest):
                return False
            self._advance(agreement.digest, agreement)
            self._launching_thread = threading.get_ident()
            return True

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
        self._client.announce_left(self._departures, self._position)

    def look_for_closed_ranks(self, position: float, ranks: Iterable[int] | None = None) -> None:
        """Raises RankFailed when another rank has closed the communicator before it had passed this event.

        Args:
            position: of the event.
            ranks: whom to look for, by their numbers in the world; None is all.
        """
        raise_if_left(self._client, self._departures, self._label, position, ranks)

    def close(self) -> None:
        """Stops listening."""
        self._client.unfollow(self._group)

    def _other_ranks(self) -> list[int]:
        """Returns the others' numbers in the world."""
        return [rank for rank in self._client.world_ranks if rank != self._own_rank]

    def _advance(self, digest: int, launched: Agreement | None) -> None:
        self._history.append(digest)
        self._launched.append(launched)
        self._position += 1

    def _launched_at(self, position: int) -> Agreement | None:
        """Returns what was launched by prediction at a position that lies behind; None for what was asked about."""
        age = self._position - position
        return self._launched[-age] if age <= len(self._launched) else _forgotten(position)

    def _on_asked(self, position: int) -> LaunchedEvent | None:
        """Hears that another rank asks about an event; tells what was launched there, if that has happened."""
        with self._lock:
            if position >= self._position:
                self._asked_at = position
                return None
            launched = self._launched_at(position)
            if launched is None:
                return None  # its question crossed this rank's own
            self._overtaken_at = position
            self.was_overtaken = True
            found = caller(self._launching_thread)  # not the line of the call, which has returned, but one near it
            place = "" if found is None else f"launched; by now at {found}"
            self._told = position, f"{place}\n{launched.describe()}"
            return LaunchedEvent(launched.digest, self._told[1])

    def _ask(self, position: int, digest: int) -> Decision:
        began = time.monotonic()
        while True:
            left_seconds = max(began + self._timeout_seconds - time.monotonic(), 1e-3)
            try:
                return self._client.agree(
                    self._group, position, digest, timeout_seconds=min(left_seconds, _ASK_AGAIN_AFTER_SECONDS)
                )
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
