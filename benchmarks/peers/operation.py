"""One contender on one rank, and its rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from peers.workload import Workload

# A rank that has slept is ahead of others in the scheduler's eyes: beside a busy process it would have the core for
# itself at first. It may also have woken on the other rank's core. Ranks that train have computed for long.
COMPUTE_FIRST_SECONDS = 0.2


class NotOffered(Exception):
    """The system has no such collective."""


def compute_for(seconds: float) -> None:
    """Keeps this rank's core busy for a while."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def nothing() -> None:
    """The default preparation of a round: nothing."""


@dataclass(frozen=True)
class Operation:
    """The timed operation.

    Attributes:
        run: does the operation once.
        results: returns where its results are, in the order of the arrays; None: it leaves none to look at.
        prepare_round: what a round needs before its clock starts.
        inputs: the arrays that it works on, where they are others than the workload's.
        rounding: how far its results may be off, as a part of them.
    """

    run: Callable[[], object]
    results: Callable[[], list[np.ndarray]] | None
    prepare_round: Callable[[], object] = nothing
    inputs: list[np.ndarray] | None = None
    rounding: float = 0.0

    def seconds(self, calls: int, barrier: Callable[[], object]) -> float:
        """Returns the seconds of one call in a round. Every rank must call it."""
        self.prepare_round()
        barrier()
        began = time.perf_counter()
        for _ in range(calls):
            self.run()
        return (time.perf_counter() - began) / calls


def take_turns(
    operations: Mapping[str, Operation], workload: Workload, barrier: Callable[[], object]
) -> dict[str, list[float]]:
    """Times a block of rounds of each. Every rank must call it, for the same ones.

    Every second round goes backwards, so that none always follows the same other one.

    Returns:
        By name the seconds of one call, round by round.
    """
    compute_for(COMPUTE_FIRST_SECONDS)
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    for number in range(workload.warm_up + workload.rounds):
        for name in list(operations)[:: -1 if number % 2 else 1]:
            seconds[name].append(operations[name].seconds(workload.calls, barrier))
    return {name: of_one[workload.warm_up :] for name, of_one in seconds.items()}


class System(Protocol):
    """The communication of one system between the two ranks."""

    rank: int
    versions: dict[str, str]

    def barrier(self) -> object:
        """Returns once both ranks have called it."""

    def operations(self, workload: Workload, arrays: list[np.ndarray]) -> Mapping[str, Operation]:
        """Returns what this system's contenders do with the arrays, in place. Every rank must call it."""

    def close(self) -> object:
        """Leaves the group."""
