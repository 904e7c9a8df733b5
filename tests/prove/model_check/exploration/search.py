"""Breadth first through all states of a configuration, so that a counterexample is among the shortest there are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from exploration.canonical import fingerprint
from exploration.configuration import Configuration, Move
from exploration.core_side import Violation
from exploration.model import Model
from exploration.moves import open_moves
from exploration.world import World


@dataclass(frozen=True)
class Counterexample:
    """The moves that lead to a state in which an invariant does not hold."""

    moves: tuple[Move, ...]
    complaint: str


@dataclass(frozen=True)
class Result:
    """What a search has found.

    Attributes:
        states: how many different ones were reached.
        moves: how many were made between them.
        depth: the longest of the shortest ways to a state.
        is_closed: whether these are all states that can be reached.
        counterexample: the shortest, or None.
    """

    configuration: Configuration
    states: int
    moves: int
    depth: int
    is_closed: bool
    seconds: float
    counterexample: Counterexample | None

    def as_json(self) -> dict[str, Any]:
        """Returns it for the file of results."""
        found = self.counterexample
        return {
            "name": self.configuration.name,
            "about": self.configuration.about,
            "ranks": len(self.configuration.programs),
            "rare_moves": dict(self.configuration.rare),
            "states": self.states,
            "moves": self.moves,
            "depth": self.depth,
            "closed": self.is_closed,
            "seconds": round(self.seconds, 1),
            "violation": None if found is None else {"moves": [list(m) for m in found.moves], "what": found.complaint},
        }


class Search:
    """One search.

    Args:
        configuration: what is played.
        most_states: after which it is given up.
    """

    def __init__(self, configuration: Configuration, *, most_states: int | None = None) -> None:
        self._model = Model(configuration)
        self._most_states = most_states
        self._came_by: dict[bytes, tuple[bytes, Move] | None] = {}
        self._moves = 0

    def run(self) -> Result:
        """Goes through the states, level by level."""
        began = time.perf_counter()
        world = self._model.start()
        first = fingerprint(world, world.now)
        self._came_by[first] = None
        level, depth, found = [(first, world.packed())], 0, None
        while level and found is None and not self._is_full:
            level, found = self._expand(level)
            depth += bool(level) or found is not None
        return Result(
            self._model.configuration,
            states=len(self._came_by),
            moves=self._moves,
            depth=depth,
            is_closed=not level and found is None and not self._is_full,
            seconds=time.perf_counter() - began,
            counterexample=found,
        )

    @property
    def _is_full(self) -> bool:
        return self._most_states is not None and len(self._came_by) >= self._most_states

    def _expand(self, level: list[tuple[bytes, bytes]]) -> tuple[list[tuple[bytes, bytes]], Counterexample | None]:
        """Returns the states one move further that were not met before, or a counterexample."""
        new_level = []
        for origin, packed in level:
            if self._is_full:
                break
            for move in list(open_moves(self._model.configuration, World.unpacked(packed))):
                world = World.unpacked(packed)
                self._moves += 1
                try:
                    self._model.make(world, move)
                    state = fingerprint(world, world.now)
                    if state in self._came_by:
                        continue
                    self._came_by[state] = (origin, move)
                    new_level.append((state, world.packed()))
                    self._model.check_that_deadlines_end_every_wait(world)
                except Violation as violation:
                    return [], Counterexample((*self._way_to(origin), move), str(violation))
        return new_level, None

    def _way_to(self, state: bytes) -> list[Move]:
        moves = []
        while (came_by := self._came_by[state]) is not None:
            state, move = came_by
            moves.append(move)
        return moves[::-1]


def tell(configuration: Configuration, found: Counterexample) -> Iterator[str]:
    """Returns a counterexample as a story: each move, what the core heard, and what it did."""
    model = Model(configuration)
    world = model.start()
    for number, move in enumerate(found.moves, 1):
        what, whom = move
        yield f"{number}. {what}" + ("" if what in ("time", "late") else f" {whom}")
        try:
            model.make(world, move)
        except Violation:
            yield from (f"     {line}" for line in model.story)
            break
        yield from (f"     {line}" for line in model.story)
    yield f"   violated: {found.complaint}"
