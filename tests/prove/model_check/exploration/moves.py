"""The moves that are open in a state.

A move is a rank's next step, a turn of its fate, a turn of the network's, or time: it goes on to the next moment at
which the core wants to be woken. Any order of moves is possible, so that timers end at any point of anything else.
"""

from __future__ import annotations

from collections.abc import Iterator

from exploration import network
from exploration.configuration import Configuration, Move
from exploration.steps import Step
from exploration.world import Life, RankModel, World

DELIVERIES = ("take", "hand")
FATES = ("crash", "reset", "vanish", "stop", "leave", "cancel", "report", "beat")


def open_moves(configuration: Configuration, world: World) -> Iterator[Move]:
    """Returns what may happen next, the same order every time."""
    for model in world.ranks:
        yield from ((what, model.rank) for what in _moves_of(configuration, world, model))
    for connection, wire in world.wires.items():
        yield from (("take", connection),) if wire.to_server else ()
        yield from (("hand", connection),) if wire.to_client else ()
        if world.left.get("tamper"):
            yield from ((what, connection) for what in network.tamperings(wire))
    if world.core.next_deadline() is not None:
        yield ("time", 0)
        if world.left.get("late"):
            yield ("late", 0)


def _moves_of(configuration: Configuration, world: World, model: RankModel) -> Iterator[str]:
    if model.life is Life.OUT and model.attempts < configuration.attempts:
        yield "join"
    if model.may_act:
        if model.life in (Life.READY, Life.OVER) and next_step(configuration, model) is not None:
            yield "step"
        yield from ("answer",) if model.is_asked else ()
        yield from ("goodbye",) if model.life is Life.OVER else ()
    for fate in FATES:
        if world.left.get(fate) and _is_possible(model, fate):
            yield fate
    if model.is_stopped and world.left.get("resume"):
        yield "resume"
    if world.left.get("impostor") and model.is_connected:
        yield "impostor"


def next_step(configuration: Configuration, model: RankModel) -> Step | None:
    """Returns what a member does next by itself, or None."""
    program = configuration.programs[model.rank]
    is_left = model.joined and model.next_step < len(program)
    return program[model.next_step] if is_left else None


def _is_possible(model: RankModel, fate: str) -> bool:
    if fate in ("crash", "reset", "vanish"):
        return model.is_connected
    if fate == "cancel":
        return model.may_act and model.last_asked is not None
    if fate == "report":
        return model.may_act and bool(model.joined) and model.life is Life.READY
    return model.may_act
