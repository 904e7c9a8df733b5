"""Measures what agreement, flight recorder and heartbeats cost in a training step, on two ranks over shared memory.

    python benchmarks/steady_cost.py          # writes benchmarks/results/steady_cost.json
    python benchmarks/steady_cost.py --quick  # two rounds of the small model, writes nothing

One pair of processes trains; block by block it does so as ever, without the recorder, without agreement, without
heartbeats, without all three, and, beside these, in debug mode and traced, in an order that changes from round to
round, some steps each. A step counts with its slowest rank. The cost is the lower quartile of the step's times over
that without, less 1: those are the steps that nothing else on the machine has held up. A 95 % interval comes from
resampling the rounds (bootstrap).

Beside that stands what is counted: what each of them does in a step, timed by itself, over the time of the step. That
does not suffer from the noise of a busy machine, nor does it see caches and waiting. For heartbeats, which come twice a
second and so in few of the steps, it is the better figure.

The exit code is 1 when all three together cost more than 1 % beyond doubt: when all of the interval lies above it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import gradsync as gs
from gradsync import process_group
from measurement import Seconds, add_output, provenance, write_result
from steady_contenders import ALL_THREE, CONTENDERS, MODELS, SILENT, USUAL, WITH, WITHOUT, Model

TARGET = 0.01
# Rounds, and the steps of a block: short blocks, so that other programs disturb all contenders alike.
AMOUNTS = {"three layers": (150, 4), "ResNet-50": (16, 2)}


@dataclass
class Plan:
    """The extent of a model's measurement."""

    model: str
    rounds: int
    steps: int


@gs.launcher(n_gpus=2, device_type="cpu")
def measure(plan: Plan) -> tuple[dict[str, list[list[float]]], dict[str, float]]:
    """Returns the time of each step of each round, by contender, and each contender's counted time."""
    comm = gs.get_communicator()
    model = MODELS[plan.model]()
    for _ in range(3):
        model.step()
    took: dict[str, list[list[float]]] = {name: [] for name in CONTENDERS}
    chance = random.Random(plan.model)  # the same on both ranks
    for _ in range(plan.rounds):
        for name in _order(chance):
            comm.barrier()
            with CONTENDERS[name](comm, model):
                samples = np.array([_time_of(model.step, 1) for _ in range(plan.steps)])
            took[name].append(comm.all_reduce(samples, "max").tolist())
    return took, _counted(comm, model)


def _order(chance: random.Random) -> list[str]:
    """Returns the contenders in a new order, without two silent ones in a row: the server would ask."""
    order = [name for name in CONTENDERS if name not in SILENT]
    chance.shuffle(order)
    for place, name in zip((1, 4), chance.sample(SILENT, len(SILENT)), strict=True):
        order.insert(place, name)
    return order


def _counted(comm: gs.Communicator, model: Model) -> dict[str, float]:
    """Returns the seconds that each of the three takes in a step, and in a second for heartbeats, timed alone."""
    recorder, agreements = comm.recorder, model.sync._step.reducer.events
    before = recorder.begun
    model.step()
    collectives = recorder.begun - before
    known = [agreement for _, _, agreement in agreements._known]

    def record() -> None:
        recorder.begin(known[0])
        recorder.end()

    def agree() -> None:
        agreements.begin_step()
        for event, _, _ in agreements._known[:-1]:
            agreements.next(event)

    client = process_group._client
    beat = client._connection._beat
    agree_seconds = _time_of(agree, 200) + _time_of(comm.barrier, 200)
    agreements.begin_step()
    return {
        "collectives a step": float(collectives),
        "recorder": collectives * _time_of(record, 2000),
        "agreement": agree_seconds,
        "heartbeats": 2 * _time_of(lambda: beat(time.monotonic(), was_late=False), 50),
    }


def _time_of(function: Callable[[], object], times: int) -> float:
    """Returns the median of the times of a call, in seconds."""
    samples = []
    for _ in range(times):
        began = time.perf_counter()
        function()
        samples.append(time.perf_counter() - began)
    return float(np.median(samples))


@dataclass(frozen=True)
class Cost:
    """The cost of one feature in a step of a model.

    Attributes:
        of: the feature.
        excess: the longer time of the step with the feature, over the time of the step without it.
        low, high: the 95 % interval.
        counted: the feature's own time in a step, over the time of the step; None if that was not timed.
    """

    of: str
    excess: float
    low: float
    high: float
    counted: float | None


def cost_of(name: str, more: list[list[float]], less: list[list[float]], counted: float | None) -> Cost:
    """Compares a contender's steps with those of another one in the same rounds."""
    with_it, without = np.array(more), np.array(less)
    chosen = np.random.default_rng(0).integers(len(with_it), size=(2000, len(with_it)))
    resampled = [_excess(with_it[rounds], without[rounds]) for rounds in chosen]
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Cost(name, _excess(with_it, without), float(low), float(high), counted)


def _excess(more: np.ndarray[Any, Any], less: np.ndarray[Any, Any]) -> float:
    return float(np.quantile(more, 0.25) / np.quantile(less, 0.25) - 1.0)


def costs(took: dict[str, list[list[float]]], counted: dict[str, float]) -> list[Cost]:
    """Returns the costs for a model: of features that are always on, and of optional ones."""
    step = float(np.median(took[USUAL]))
    per_step = {**counted, "heartbeats": counted["heartbeats"] * step}
    per_step[ALL_THREE] = sum(per_step[name] for name in WITHOUT if name != ALL_THREE)
    always = [
        cost_of(name, took[USUAL], took[name], per_step[name] / step if name in per_step else None) for name in WITHOUT
    ]
    return always + [cost_of(name, took[name], took[USUAL], None) for name in WITH]


def measured(plan: Plan) -> tuple[dict[str, Any], list[Cost]]:
    """Measures a model; returns its part of the file of results, and its costs."""
    took, counted = measure(plan)[0]
    found = costs(took, counted)
    step = Seconds.of([seconds for of_round in took[USUAL] for seconds in of_round])
    costs_told = [asdict(cost) for cost in found]
    told = {"model": plan.model, "step_seconds": asdict(step), "rounds": plan.rounds, "counted_seconds": counted}
    return {**told, "costs": costs_told}, found


def plans(rounds: int | None, *, is_quick: bool) -> list[Plan]:
    """Returns the measurements; `rounds` None takes as many for each model as its figures need."""
    if is_quick:
        name = next(iter(MODELS))
        return [Plan(name, 2, AMOUNTS[name][1])]
    return [Plan(name, rounds or usual, steps) for name, (usual, steps) in AMOUNTS.items()]


def main(arguments: list[str] | None = None) -> int:
    """Measures, shows and writes; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds of the small model; writes only with --output")
    parser.add_argument("--rounds", type=int, help="how many; writes likewise")
    add_output(parser, "steady_cost")
    options = parser.parse_args(arguments)
    origin = provenance("benchmarks/steady_cost.py")
    of_models = [measured(plan) for plan in plans(options.rounds, is_quick=options.quick)]
    whole = not options.quick and options.rounds is None
    result = {**origin, "target": TARGET, "results": [told for told, _ in of_models]}
    write_result("steady_cost", options.output, result, is_whole=whole)
    always = [cost for _, found in of_models for cost in found if cost.of == ALL_THREE]
    return int(any(cost.low > TARGET for cost in always))


if __name__ == "__main__":
    sys.exit(main())
