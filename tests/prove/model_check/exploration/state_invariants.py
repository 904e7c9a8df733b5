"""What has to hold in every state, between two turns. Each returns what is wrong, or None."""

from __future__ import annotations

from collections.abc import Callable

from exploration.canonical import fingerprint
from exploration.world import World, new_core
from gradsync.rendezvous.messages import FrameType

_LONGEST_WAIT_SECONDS = 1.0  # of all that the steps ask for
_MOST_CLOSED_WAITS = 64  # that lie in the heap until their deadline, beside as many as there are open ones


def every_wait_has_a_deadline(world: World) -> str | None:
    """While a request waits, the core asks to be woken, by the latest at that request's own deadline."""
    waiting = any(message.type in _TIMED for asked in world.ledger.open.values() for message in asked.values())
    due = world.core.next_deadline()
    if waiting and (due is None or due > world.now + _LONGEST_WAIT_SECONDS + 1e-9):
        return f"requests wait, and the core wants to be woken at {due}; it is {world.now}"
    return None


def the_core_keeps_the_same_books(world: World) -> str | None:
    """The core has as seats and open waits what was told, sent and answered: nothing else, and nothing twice."""
    core, ledger = world.core, world.ledger
    seats = {connection: rank for connection, (_, rank) in core._seats.items()}
    expected = {connection: rank for connection, (_, rank) in ledger.seats.items()}
    if seats != expected:
        return f"the core has seats {seats}, told were {expected}"
    waits = {(c, s) for c, by_sequence in core._waits._by_connection.items() for s in by_sequence}
    asked = {(c, s) for c, by_s in ledger.open.items() for s, m in by_s.items() if m.type is not FrameType.ABSENT}
    if waits != asked or core._waits._open != len(waits):
        return f"the core has waits {sorted(waits)} ({core._waits._open}), without an answer are {sorted(asked)}"
    return None


def nothing_is_kept_of_who_has_gone(world: World) -> str | None:
    """No clock, wait or generation outlives the connections that it was for."""
    core = world.core
    if not set(core._silences._silences) <= set(core._seats):
        return f"clocks of {sorted(core._silences._silences)} run, seated are {sorted(core._seats)}"
    kept = {id(generation) for generation in core._generations}
    if kept != {id(generation) for generation, _ in core._seats.values()}:
        return f"{len(kept)} generations are kept, of which not all have members"
    if len(core._waits._heap) > 2 * core._waits._open + _MOST_CLOSED_WAITS:
        return f"{len(core._waits._heap)} waits are kept, open are {core._waits._open}"
    return None


def a_core_without_connections_is_as_new(world: World) -> str | None:
    """When all have gone the core is in the state that it began in, but for the number of the last generation."""
    if world.core._seats:
        return None
    formed = world.core.formed_count
    new = new_core(world.core._world_size, formed=formed, host=world.core._host)
    is_same = fingerprint(world.core, world.now) == fingerprint(new, world.now)
    return None if is_same else "all have gone, and something is left in the core"


_TIMED = (FrameType.JOIN, FrameType.BARRIER, FrameType.AGREE, FrameType.GET, FrameType.GET_ID)

STATE_INVARIANTS: tuple[Callable[[World], str | None], ...] = (
    every_wait_has_a_deadline,
    the_core_keeps_the_same_books,
    nothing_is_kept_of_who_has_gone,
    a_core_without_connections_is_as_new,
)
