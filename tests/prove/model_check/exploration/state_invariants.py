"""What has to hold in every state, between two turns. Each returns what is wrong, or None."""

from __future__ import annotations

from collections.abc import Callable

from exploration.canonical import fingerprint
from exploration.world import World, new_core


def the_core_keeps_the_same_books(world: World) -> str | None:
    """The core has as seats and open waits what was told, sent and answered: nothing else, and nothing twice."""
    core, ledger = world.core, world.ledger
    seats = {connection: rank for connection, (_, rank) in core._member_of.items()}
    expected = {connection: rank for connection, (_, rank) in ledger.seats.items()}
    if seats != expected:
        return f"the core has seats {seats}, told were {expected}"
    waits = {(c, s) for c, by_sequence in core._waits._by_connection.items() for s in by_sequence}
    asked = {(c, s) for c, by_sequence in ledger.open.items() for s in by_sequence}
    if waits != asked:
        return f"the core has waits {sorted(waits)}, without an answer are {sorted(asked)}"
    return None


def nothing_is_kept_of_who_has_gone(world: World) -> str | None:
    """No clock, wait or generation outlives the connections that it was for."""
    core = world.core
    if not set(core._peers._peers) <= set(core._member_of):
        return f"clocks of {sorted(core._peers._peers)} run, seated are {sorted(core._member_of)}"
    kept = {id(generation) for generation in core._generations}
    if kept != {id(generation) for generation, _ in core._member_of.values()}:
        return f"{len(kept)} generations are kept, of which not all have members"
    return None


def a_core_without_connections_is_as_new(world: World) -> str | None:
    """When all have gone the core is in the state that it began in, but for the number of the last generation."""
    if world.core._member_of:
        return None
    formed = world.core.formed_count
    new = new_core(world.core._world_size, formed=formed, host=world.core._host)
    is_same = fingerprint(world.core, world.now) == fingerprint(new, world.now)
    return None if is_same else "all have gone, and something is left in the core"


STATE_INVARIANTS: tuple[Callable[[World], str | None], ...] = (
    the_core_keeps_the_same_books,
    nothing_is_kept_of_who_has_gone,
    a_core_without_connections_is_as_new,
)
