"""What a seed stands for: how many ranks do what, in which weather, and what goes wrong when."""

from __future__ import annotations

import random
from dataclasses import dataclass

from simulation.streams import Weather

_HERE, _THERE = "one machine", "another machine"
_WEATHERS = (
    Weather(),
    Weather(latency_seconds=0.02, accept_seconds=0.01),
    Weather(most_bytes=40),
    Weather(window_bytes=150, latency_seconds=0.005),
    Weather(most_bytes=1, latency_seconds=0.0005),
)
_WEIGHTS = (43, 30, 15, 10, 2)
KINDS = (
    "barrier",
    "unique id",
    "keys",
    "exchange",
    "leaving",
    "group",
    "compute",
    "collective",
    "two threads",
)
# Faults, and how often each is drawn. Of the first ones nobody is to notice anything.
_FAULTS = {
    "none": 20,
    "slow": 5,
    "short stop": 5,
    "short cut": 5,
    "wall clock": 5,
    "crash": 20,
    "stop": 10,
    "cut": 8,
    "vanish": 6,
    "reset": 8,
    "raises": 6,
    "absent": 6,
    "server crash": 6,
}
HARMLESS = ("none", "slow", "short stop", "short cut", "wall clock")


@dataclass(frozen=True)
class Step:
    """One step that all ranks take, each when it comes to it; `number` tells it from the others of its kind."""

    kind: str
    number: int


@dataclass(frozen=True)
class Fault:
    """What goes wrong, to which rank, when (seconds from the start) and for how long, or at which of its steps."""

    kind: str
    victim: int
    at_seconds: float
    for_seconds: float | None = None
    at_step: int | None = None


@dataclass(frozen=True)
class Scenario:
    """Everything that is drawn before a run begins; the rest is drawn as it goes on."""

    seed: int
    machines: tuple[str, ...]  # of each rank; the server's is the first
    weather: Weather
    steps: tuple[Step, ...]
    fault: Fault

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.machines)


def draw(seed: int) -> Scenario:
    """Returns the scenario of a seed."""
    choices = random.Random(f"scenario {seed}")
    world_size = choices.choice((2, 2, 3))
    machines = tuple(choices.choice((_HERE, _HERE, _THERE)) for _ in range(world_size))
    steps = tuple(Step(choices.choice(KINDS), number) for number in range(choices.randint(2, 5)))
    (weather,) = choices.choices(_WEATHERS, _WEIGHTS)
    return Scenario(seed, (_HERE, *machines[1:]), weather, steps, _draw_fault(choices, world_size, len(steps)))


def _draw_fault(choices: random.Random, world_size: int, steps: int) -> Fault:
    (kind,) = choices.choices(tuple(_FAULTS), tuple(_FAULTS.values()))
    victim = choices.randrange(world_size)
    # Most runs are over within half a second: early moments meet the handshake and the joining, late ones the steps.
    at_seconds = choices.choice((choices.random() * 0.05, choices.random() * 0.2, choices.random() * 0.5))
    for_seconds = {
        "short stop": choices.random() * 0.9,
        "short cut": choices.random() * 0.9,
        "slow": choices.random() * 0.02,
    }.get(kind)
    at_step = choices.randrange(steps) if kind in ("absent", "raises") else None
    return Fault(kind, victim, at_seconds, for_seconds, at_step)
