"""The core in the middle of the model: each event is checked by the invariants, and what the core does is passed on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from exploration.invariants import TURN_INVARIANTS
from exploration.ledger import Turn
from exploration.world import World
from gradsync.rendezvous.frames import Action, Close, Event, FrameType, Inspect, Inspected, Lost, Received, Send
from gradsync.rendezvous.liveness import ProcessState


class Violation(Exception):
    """An invariant does not hold; the text says which, and why not."""


class Ranks(Protocol):
    """Those around the core."""

    def hear(self, world: World, connection: int, frame_type: FrameType, fields: tuple[Any, ...]) -> None:
        """Takes in what the server has sent."""

    def hear_end(self, world: World, connection: int) -> None:
        """Takes in that the server has closed the connection."""


class CoreSide:
    """Runs the core of a state.

    Args:
        ranks: who hears what it sends.

    Attributes:
        turns: what it heard and did since the list was cleared.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.turns: list[Turn] = []

    def happen(self, world: World, event: Event) -> None:
        """Lets the core take an event, and all that follows from that by itself.

        Raises:
            Violation: an invariant does not hold.
        """
        following = [event]
        while following:
            turn = self._take(world, following.pop(0))
            world.ledger.settle(turn)
            world.core.next_deadline()  # the loop asks after every turn, which drops what has ended
            for action in turn.actions:
                following += self._carry_out(world, action)

    def story(self) -> list[str]:
        """Returns these turns in words, a line for each event and action."""
        return [
            line
            for turn in self.turns
            for line in (_in_words(turn.event), *(f"  -> {_in_words(action)}" for action in turn.actions))
        ]

    def _take(self, world: World, event: Event) -> Turn:
        turn = world.ledger.take(event, [])
        self.turns.append(turn)
        try:
            turn.actions = world.core.handle(world.now, event)
        except Exception as error:
            raise Violation(f"the_core_never_raises: {type(error).__name__}: {error}") from error
        for invariant in TURN_INVARIANTS:
            complaint = invariant(turn)
            if complaint:
                raise Violation(f"{invariant.__name__}: {complaint}")
        return turn

    def _carry_out(self, world: World, action: Action) -> Iterator[Event]:
        if isinstance(action, Inspect):
            yield Inspected(action.peer, _look_at(world, action.peer))
        elif isinstance(action, Close):
            self._ranks.hear_end(world, action.connection)
            yield Lost(action.connection, "closed by the server")
        elif isinstance(action, Send):
            self._ranks.hear(world, action.connection, action.type, action.fields)


def _look_at(world: World, connection: int) -> ProcessState:
    model = world.rank_of(connection)
    if model is None:
        return ProcessState.GONE
    return ProcessState.STOPPED if model.is_stopped else ProcessState.RUNNING


def _in_words(what: Event | Action) -> str:
    """Returns an event or an action with its fields, which its own repr keeps to itself."""
    if isinstance(what, Send):
        return f"to {what.connection}: {what.type.name} {what.fields}"
    if isinstance(what, Received):
        return f"from {what.connection}: {what.message.type.name} #{what.message.sequence} {what.message.fields}"
    return str(what)
