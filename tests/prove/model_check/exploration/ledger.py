"""What an observer of every message knows: who sits in which generation, what is open, what was told, who is to blame.

It is kept beside the core and knows nothing of its insides; the invariants compare the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gradsync.rendezvous.frames import (
    THE_WORLD,
    TO_GENERATION,
    Action,
    Close,
    Event,
    FrameType,
    Inspected,
    Lost,
    Message,
    Received,
    Send,
)
from gradsync.rendezvous.roster import LEFT_PHASE

ANSWERS = (*(FrameType.REPLY, FrameType.REFUSED, FrameType.TIMED_OUT, FrameType.FAILED, FrameType.VALUES),)
ASKS = (
    *(FrameType.JOIN, FrameType.SET, FrameType.GET, FrameType.DELETE, FrameType.EXCHANGE),
    FrameType.LEFT_RANKS,
)


@dataclass(slots=True)
class Era:
    """One generation, as it looks from outside."""

    members: dict[int, int] = field(default_factory=dict)  # rank -> connection; departed ones too, once they count
    number: int | None = None
    left: set[int] = field(default_factory=set)
    blamed: int | None = None  # the rank that is the first cause of its failure
    verdict: tuple[Any, ...] | None = None  # the failure, word for word, as it was told first
    begun: dict[int, int] = field(default_factory=dict)  # rank -> the collective in which it says it waits
    has_claim: bool = False  # that a collective has reached its deadline
    values: dict[str, bytes] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """Whether anything has happened that ends it."""
        return self.blamed is not None


@dataclass(slots=True)
class Turn:
    """One event and what the core did about it; the ledger has taken in the event, and not yet the actions.

    Attributes:
        due: connections that have to be told now that their generation has failed.
        suspects: ranks that a failure may name that was not due, but is in order now.
        subject: of a message or a loss: the generation and the rank that it comes from.
    """

    event: Event
    actions: list[Action]
    ledger: Ledger
    era: Era | None = None
    rank: int | None = None
    due: set[int] = field(default_factory=set)
    suspects: set[int] = field(default_factory=set)

    @property
    def sends(self) -> list[Send]:
        """The messages that went out."""
        return [action for action in self.actions if isinstance(action, Send)]

    @property
    def answers(self) -> list[Send]:
        """The messages that answer a request."""
        return [s for s in self.sends if s.type in ANSWERS and not _is_push(s)]

    @property
    def pushes(self) -> list[Send]:
        """The messages that tell a failure to a whole generation."""
        return [send for send in self.sends if _is_push(send)]

    def asked(self, answer: Send) -> Message | None:
        """Returns the open request that an answer is for."""
        return self.ledger.open.get(answer.connection, {}).get(answer.fields[0])

    def era_at(self, connection: int) -> Era | None:
        """Returns the generation in which a connection sat when the event came."""
        seat = self.ledger.seats.get(connection)
        return None if seat is None else seat[0]

    def rank_at(self, connection: int) -> int | None:
        """Returns the rank of a connection that has joined, or asks to in this very turn."""
        if connection in self.ledger.seats:
            return self.ledger.seats[connection][1]
        event = self.event
        if isinstance(event, Received) and event.connection == connection and event.message.type is FrameType.JOIN:
            return int(event.message.fields[0])
        return None


@dataclass(slots=True)
class Ledger:
    """What the observer has written down."""

    world_size: int
    eras: list[Era] = field(default_factory=list)  # the earliest first
    seats: dict[int, tuple[Era, int]] = field(default_factory=dict)
    open: dict[int, dict[int, Message]] = field(default_factory=dict)  # requests without an answer, by connection
    alive: set[int] = field(default_factory=set)  # connections that may be sent something
    told: set[int] = field(default_factory=set)  # those that know that their generation has failed
    numbers: int = 0  # of the generations that have formed, the last

    def take(self, event: Event, actions: list[Action]) -> Turn:
        """Takes in an event, and returns the turn that it began."""
        turn = Turn(event, actions, self)
        connection = event.peer if isinstance(event, Inspected) else getattr(event, "connection", None)
        if connection in self.seats:
            turn.era, turn.rank = self.seats[connection]
        if isinstance(event, Received):
            self._take_message(turn, event.connection, event.message)
        elif isinstance(event, Lost):
            self._take_loss(turn, event.connection)
        elif isinstance(event, Inspected):
            if turn.rank is not None and event.state.is_fatal:
                turn.suspects = {turn.rank}
        else:
            turn.suspects = {rank for era in self.eras if era.has_claim for rank in era.members}
        return turn

    def settle(self, turn: Turn) -> None:
        """Takes in what the core did, once it is known to be right."""
        for action in turn.actions:
            if isinstance(action, Close):
                self.alive.discard(action.connection)
                self._remove_connection(action.connection)
            elif isinstance(action, Send):
                self._settle_send(turn, action)
        self._drop_deserted()

    def present(self, era: Era) -> set[int]:
        """Returns the connections that sit in a generation now."""
        return {connection for connection, (seated, _) in self.seats.items() if seated is era}

    def era_to_join(self, rank: int) -> Era:
        """Returns the earliest generation that has not had this rank yet."""
        for era in self.eras:
            if rank not in era.members:
                return era
        return Era()

    def _take_message(self, turn: Turn, connection: int, message: Message) -> None:
        self.alive.add(connection)
        if message.type in ASKS:
            self.open.setdefault(connection, {})[message.sequence] = message
        if turn.era is None or turn.rank is None:
            return
        if message.type is FrameType.LEAVE and message.fields[0] == THE_WORLD:
            self._leave(turn.era, turn.rank, connection)
        elif message.type is FrameType.REPORT_FAILURE:
            culprit = message.fields[1]
            blamed = culprit if culprit in turn.era.members else turn.rank
            self._blame(turn, turn.era, blamed)
        elif not turn.era.has_failed and turn.era.number is not None:
            _take_word(turn.era, turn.rank, message)

    def _take_loss(self, turn: Turn, connection: int) -> None:
        self.alive.discard(connection)
        if turn.era is None or turn.rank is None:
            return
        self._remove_connection(connection)
        self._blame(turn, turn.era, turn.rank)

    def _leave(self, era: Era, rank: int, connection: int) -> None:
        self.alive.discard(connection)
        self._remove_connection(connection)
        if era.number is None and not era.has_failed:
            del era.members[rank]
        else:
            era.left.add(rank)

    def _blame(self, turn: Turn, era: Era, rank: int) -> None:
        if era.has_failed:
            return
        era.blamed = rank
        turn.due = self.present(era)

    def _settle_send(self, turn: Turn, send: Send) -> None:
        if send.type is FrameType.PULSE and send.connection not in self.seats:  # the answer to its JOIN
            [message] = self.open[send.connection].values()
            rank = message.fields[0]
            era = self.era_to_join(rank)
            if era not in self.eras:
                self.eras.append(era)
            era.members[rank] = send.connection
            self.seats[send.connection] = (era, rank)
        elif _is_push(send):
            era, _ = self.seats[send.connection]
            self.told.add(send.connection)
            self.open.pop(send.connection, None)
            era.verdict = send.fields[1:]
            era.blamed = send.fields[2] if era.blamed is None else era.blamed
        elif send.type in ANSWERS:
            self._settle_answer(send, self._close(send.connection, send.fields[0]))

    def _close(self, connection: int, sequence: int) -> Message:
        """Takes a request off the books: it was answered or withdrawn."""
        asked = self.open[connection].pop(sequence)
        if not self.open[connection]:
            del self.open[connection]
        return asked

    def _settle_answer(self, send: Send, asked: Message) -> None:
        if send.connection not in self.seats:
            return
        era, rank = self.seats[send.connection]
        if send.type is FrameType.FAILED and send.fields[3] != LEFT_PHASE:
            era.verdict = send.fields[1:]
        if asked.type is FrameType.JOIN:
            if send.type is FrameType.REPLY:
                self.numbers = era.number = send.fields[1][0]
            elif send.type is FrameType.TIMED_OUT:
                del era.members[rank]
        elif send.type is FrameType.REPLY:
            _settle_reply(era, asked)

    def _remove_connection(self, connection: int) -> None:
        self.open.pop(connection, None)
        self.told.discard(connection)
        self.seats.pop(connection, None)

    def _drop_deserted(self) -> None:
        occupied = {id(era) for era, _ in self.seats.values()}
        self.eras = [era for era in self.eras if id(era) in occupied]


def _take_word(era: Era, rank: int, message: Message) -> None:
    """Takes in what a member of a running generation says of itself."""
    if message.type is FrameType.STUCK:
        era.begun[rank] = max(message.fields[2], era.begun.get(rank, 0))
        era.has_claim = era.has_claim or message.fields[6]


def _settle_reply(era: Era, asked: Message) -> None:
    """Takes in that a request was granted."""
    key = asked.fields[0] if asked.fields else None
    if asked.type is FrameType.SET:
        era.values[key] = asked.fields[1]
    elif asked.type is FrameType.DELETE:
        era.values.pop(key, None)


def _is_push(send: Send) -> bool:
    return send.type is FrameType.FAILED and send.fields[0] == TO_GENERATION
