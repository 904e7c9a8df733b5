"""The ranks' side of a sweep over thresholds: contenders take turns, round by round, on gradients that all share.

A round counts with its slowest rank. Every second round goes backwards, so that no contender always follows the same
one, and a change in the machine's mood meets all of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradsync.bench.devices import array_module
from gradsync.bench.live_text import LiveText
from gradsync.bench.threshold_report import table
from gradsync.bench.thresholds import Contender, Timings, rows_of
from gradsync.bucketing.callback import AllreduceCallback
from gradsync.bucketing.plan import GradientSpec
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.local import local_communicator
from gradsync.communicators.world import group_or_world

WARM_UP_ROUNDS = 2
_FEWEST_ROUNDS = 3  # whatever the limit says: fewer have no median to speak of
_FLOATING = ("float", "bfloat", "complex")


@dataclass(frozen=True)
class Sweep:
    """What to measure.

    Attributes:
        specs: the gradients of a step, in the order of arrival.
        contenders: the thresholds.
        steps: rounds to time.
        limit_seconds: after which no further round begins.
    """

    specs: Sequence[GradientSpec]
    contenders: Sequence[Contender]
    steps: int
    limit_seconds: float

    @property
    def total_bytes(self) -> int:
        """Bytes of all gradients together."""
        return sum(spec.size_bytes for spec in self.specs)


@dataclass(frozen=True)
class Measured:
    """What a sweep has found, and on what.

    Attributes:
        timings: of the rounds after the warm-up.
        rounds: how many those are: fewer than asked for where the limit came first.
        backend, device: of the communicator.
    """

    timings: Timings
    rounds: int
    backend: str
    device: str


def run_sweep(sweep: Sweep) -> Measured:
    """Runs on each rank, in an initialised group. Rank 0 shows the table so far on stderr, where that is a terminal."""
    communicator = group_or_world(None, "a sweep over thresholds")
    operations = _operations(sweep, communicator)
    steps = len(sweep.contenders)
    times: list[list[float]] = [[] for _ in operations]
    live = LiveText(sys.stderr if communicator.rank == 0 else None)
    began = time.perf_counter()
    for number in range(WARM_UP_ROUNDS + sweep.steps):
        slowest, elapsed_seconds = _round(operations, communicator, began, backwards=number % 2 == 1)
        measured = number + 1 - WARM_UP_ROUNDS
        if measured > 0:
            for samples, seconds in zip(times, slowest, strict=True):
                samples.append(seconds)
            if live.shows:
                rows = rows_of(
                    sweep.contenders,
                    Timings(times[:steps], times[steps:]),
                    total_bytes=sweep.total_bytes,
                    ranks=communicator.world_size,
                )
                live.show(f"{table(rows)}\nround {measured} of {sweep.steps}")
        per_round = elapsed_seconds / (number + 1)
        if measured >= _FEWEST_ROUNDS and elapsed_seconds + per_round > sweep.limit_seconds:
            break
    live.clear()
    timings = Timings(times[:steps], times[steps:])
    return Measured(timings, len(times[0]), communicator.backend, communicator.device)


def _round(
    operations: Sequence[Callable[[], None]], communicator: Communicator, began: float, *, backwards: bool
) -> tuple[list[float], float]:
    """Times each operation once; returns the slowest rank's seconds of each, and how long rank 0 has been measuring."""
    seconds = [0.0] * len(operations)
    order = range(len(operations))
    for number in reversed(order) if backwards else order:
        communicator.barrier()
        started = time.perf_counter()
        operations[number]()
        seconds[number] = time.perf_counter() - started
    # Rank 0's clock decides for all when to stop: each rank's own would have them differ.
    by_rank = communicator.objects.all_gather((seconds, time.perf_counter() - began))
    return [max(each) for each in zip(*(seconds for seconds, _ in by_rank), strict=True)], by_rank[0][1]


def _operations(sweep: Sweep, communicator: Communicator) -> list[Callable[[], None]]:
    """Returns the steps of all contenders, and then their packing alone, where that can be measured."""
    xp, wait = array_module(communicator)
    gradients = [_gradient(xp, spec, communicator.rank) for spec in sweep.specs]
    method = "mean" if all(spec.dtype.startswith(_FLOATING) for spec in sweep.specs) else "sum"
    groups: list[Communicator] = [communicator]
    if xp is np:  # what packs on a GPU is part of its communicator
        groups.append(local_communicator(force_packing=True))
    return [
        _step(AllreduceCallback(method, group, threshold_bytes=contender.threshold_bytes), gradients, wait)
        for group in groups
        for contender in sweep.contenders
    ]


def _step(callback: AllreduceCallback, gradients: Sequence[Any], wait: Callable[[], None]) -> Callable[[], None]:
    def step() -> None:
        with callback.backward():
            futures = [callback(number, gradient) for number, gradient in enumerate(gradients)]
        for future in futures:
            future.result()
        wait()

    return step


def _gradient(xp: Any, spec: GradientSpec, rank: int) -> Any:
    """Makes a gradient whose values stay in range however often it is reduced: means settle, sums of zeros are zero."""
    if spec.dtype == "bfloat16":
        import ml_dtypes

        return xp.full(spec.shape, rank, ml_dtypes.bfloat16)
    return xp.full(spec.shape, rank if spec.dtype.startswith(_FLOATING) else 0, spec.dtype)
