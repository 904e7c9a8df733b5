"""Plays seeds of the simulation: the real server and clients, on a network, a clock and threads that a seed rules.

    python tests/prove/simulation/simulation_run.py --seeds 10000
    python tests/prove/simulation/simulation_run.py --seed 42 --trace   # one seed, with all that happens
    python tests/prove/simulation/simulation_run.py --seeds 100000 --json FILE

The exit code is 1 where a check fails; the line that says so names the seed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from simulation.checks import CHECKS, complaints
from simulation.run import Outcome, play

from measurement import provenance

_SEEDS_AT_ONCE = 50


@dataclass
class Summary:
    """What came of many seeds."""

    seeds: int = 0
    events: int = 0
    virtual_seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    felt: Counter[str] = field(default_factory=Counter)  # of these, those of which a rank has been told
    violations: list[tuple[int, str]] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Takes in one seed."""
        self.seeds += 1
        self.events += len(outcome.trace)
        self.virtual_seconds += outcome.ended_at - outcome.began_at
        self.faults[outcome.scenario.fault.kind] += 1
        self.felt[outcome.scenario.fault.kind] += any(diary.error is not None for diary in outcome.diaries)
        self.violations += [(outcome.scenario.seed, complaint) for complaint in complaints(outcome)]

    def merge(self, other: Summary) -> None:
        """Takes in what came of other seeds."""
        self.seeds += other.seeds
        self.events += other.events
        self.virtual_seconds += other.virtual_seconds
        self.faults += other.faults
        self.felt += other.felt
        self.violations += other.violations

    def as_json(self) -> dict[str, Any]:
        """Returns it for the file of results."""
        return {
            "seeds": self.seeds,
            "events": self.events,
            "virtual_seconds": round(self.virtual_seconds),
            "faults": {kind: {"seeds": n, "told": self.felt[kind]} for kind, n in sorted(self.faults.items())},
            "checks": [check.__name__ for check in CHECKS],
            "violations": [{"seed": seed, "what": what} for seed, what in self.violations],
        }


def play_all(seeds: Iterable[int]) -> Summary:
    """Plays these seeds, one after the other."""
    summary = Summary()
    for seed in seeds:
        summary.add(play(seed))
    return summary


def play_side_by_side(seeds: range, jobs: int) -> Iterator[Summary]:
    """Plays these seeds in so many processes; returns what came of some of them, as it comes."""
    parts = [seeds[first : first + _SEEDS_AT_ONCE] for first in range(0, len(seeds), _SEEDS_AT_ONCE)]
    pool = ProcessPoolExecutor(jobs)
    try:
        yield from pool.map(play_all, parts)
    finally:  # where nobody wants the rest
        pool.shutdown(cancel_futures=True)


def tell(outcome: Outcome) -> None:
    """Prints everything that happened."""
    print(outcome.scenario)
    for moment, *what in outcome.trace:
        print(f"{moment - outcome.began_at:9.4f}  {' '.join(map(str, what))}")
    for rank, diary in enumerate(outcome.diaries):
        print(f"rank {rank}: {len(diary.calls)} calls, {diary.error!r}")
    print(f"trace {outcome.digest}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Play seeds of the simulation, and check each.")
    parser.add_argument("--seeds", type=int, default=1000, help="how many, from the first [1000]")
    parser.add_argument("--first", type=int, default=0, help="the first of them [0]")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--trace", action="store_true", help="with --seed: print all that happens")
    parser.add_argument("--seconds", type=float, help="begin no more seeds after so long")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes [one a core]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results go")
    return parser.parse_args()


def play_one(seed: int, *, is_traced: bool) -> int:
    outcome = play(seed)
    if is_traced:
        tell(outcome)
    found = complaints(outcome)
    print("\n".join(found) or f"seed {seed}: nothing wrong")
    return 1 if found else 0


def main() -> int:
    options = parse_options()
    if options.seed is not None:
        return play_one(options.seed, is_traced=options.trace)
    made, began, summary = (
        provenance("tests/prove/simulation"),
        time.perf_counter(),
        Summary(),
    )
    for part in play_side_by_side(range(options.first, options.first + options.seeds), options.jobs):
        summary.merge(part)
        for seed, what in part.violations:
            print(f"seed {seed}: {what}", flush=True)
        if options.seconds is not None and time.perf_counter() - began > options.seconds:
            break
    seconds = time.perf_counter() - began
    print(f"{summary.seeds} seeds, {summary.events} events, {len(summary.violations)} violations, {seconds:.0f} s")
    if options.json is not None:
        body = {**made, "seconds": round(seconds, 1), "processes": options.jobs, **summary.as_json()}
        options.json.write_text(json.dumps(body, indent=2) + "\n")
    return 1 if summary.violations else 0


if __name__ == "__main__":
    sys.exit(main())
