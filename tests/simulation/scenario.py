"""What a seed stands for: how many ranks do what, in which weather, and what goes wrong when."""

from __future__ import annotations

import random
from dataclasses import dataclass

from simulation.network import Weather

HERE, THERE = "one machine", "another machine"
WEATHERS = (
    Weather(),
    Weather(latency_seconds=0.02, accept_seconds=0.01),
    Weather(most_bytes=40),
    Weather(window_bytes=150, latency_seconds=0.005),
    Weather(most_bytes=1, latency_seconds=0.0005),
)
WEIGHTS = (43, 30, 15, 10, 2)
KINDS = ("barrier", "unique id", "keys", "exchange", "leaving", "group", "compute", "collective", "two threads")
# Faults, and how often each is drawn. Of the first ones nobody is to notice anything.
FAULTS = {
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
    "server vanish": 4,
}
BUSY = (0.02, 0.1)
HARMLESS = ("none", "slow", "short stop", "short cut", "wall clock")


@dataclass(frozen=True)
class Step:
    """One step that all ranks take, each when it comes to it; `number` tells it from the others of its kind."""

    kind: str
    number: int


@dataclass(frozen=True)
class Fault:
    """What goes wrong, to which rank, when (seconds from the start) and for how long, or at which of its steps.

    Where worlds are rebuilt the seconds count from the first world, and a rank that has crashed may start again.
    """

    kind: str
    victim: int
    at_seconds: float
    for_seconds: float | None = None
    at_step: int | None = None
    again_seconds: float | None = None

    @property
    def is_harmless(self) -> bool:
        return self.kind in HARMLESS

    @property
    def hits_server(self) -> bool:
        return self.kind.startswith("server")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where ranks run: of everything that is drawn before a run begins, what all kinds of runs have.

    Attributes:
        machines: of each rank; the server's is the first.
        busy_seconds: how long any process is kept waiting before each of its turns, at most: machines have other work.
    """

    seed: int
    machines: tuple[str, ...]
    weather: Weather
    busy_seconds: float

    @property
    def world_size(self) -> int:
        return len(self.machines)


@dataclass(frozen=True, kw_only=True)
class Scenario(Setting):
    """What ranks do there, and what goes wrong; the rest is drawn as a run goes on.

    Attributes:
        delays: how long each rank takes to start, at most.
    """

    delays: tuple[float, ...]
    steps: tuple[Step, ...]
    fault: Fault


def draw(seed: int) -> Scenario:
    """Returns the scenario of a seed."""
    choices = random.Random(f"scenario {seed}")
    world_size = choices.choice((2, 2, 3))
    machines = (HERE, *(choices.choice((HERE, HERE, THERE)) for _ in range(world_size - 1)))
    delays = [0.05] * world_size
    if choices.random() < 0.2:  # the others wait to be complete, and the fault may come meanwhile
        delays[choices.randrange(world_size)] = 2.0
    steps = tuple(Step(choices.choice(KINDS), number) for number in range(choices.randint(2, 5)))
    (weather,) = choices.choices(WEATHERS, WEIGHTS)
    fault = _draw_fault(choices, world_size, len(steps))
    if fault.kind == "absent":  # from a collective, which the others report; elsewhere it is only slow
        steps = tuple(Step("collective", step.number) if step.number == fault.at_step else step for step in steps)
    is_busy = choices.random() < (0.5 if fault.kind == "absent" else 0.1) and weather.most_bytes > 1
    return Scenario(
        seed=seed,
        machines=machines,
        weather=weather,
        busy_seconds=choices.choice(BUSY) if is_busy else 0.0,
        delays=tuple(delays),
        steps=steps,
        fault=fault,
    )


def _draw_fault(choices: random.Random, world_size: int, steps: int) -> Fault:
    (kind,) = choices.choices(tuple(FAULTS), tuple(FAULTS.values()))
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
