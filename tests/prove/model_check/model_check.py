"""Goes through all states that the server's core can come to, with up to three ranks and every mishap around them.

    python tests/prove/model_check/model_check.py
    python tests/prove/model_check/model_check.py --only barrier absence
    python tests/prove/model_check/model_check.py --json FILE

What a state is, which moves there are and what has to hold is in `exploration`. A counterexample is a shortest one; it
is told move by move, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from exploration.configuration import Configuration
from exploration.configurations import CONFIGURATIONS
from exploration.invariants import TURN_INVARIANTS
from exploration.sealed_frames import wrongly_cut, wrongly_taken
from exploration.search import Result, Search, tell
from exploration.state_invariants import STATE_INVARIANTS

from measurement import provenance

MOST_STATES = 30_000
_FRAMES = 5  # of each sequence that a session meets


def search(configuration: Configuration, most_states: int) -> Result:
    """Searches one configuration."""
    return Search(configuration, most_states=most_states).run()


def search_all(configurations: Sequence[Configuration], most_states: int, jobs: int) -> Iterator[Result]:
    """Searches them side by side; returns each result, in their order."""
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(partial(search, most_states=most_states), configurations)


def report(result: Result) -> None:
    """Prints what a search has found."""
    extent = "all" if result.is_closed else "not all"
    name = result.configuration.name
    print(f"{name:28} {result.states:7} states ({extent}) {result.moves:8} moves, depth {result.depth}", flush=True)
    if result.counterexample is not None:
        print("\n".join(tell(result.configuration, result.counterexample)))


def as_json(results: Sequence[Result], frame_violations: Sequence[str], seconds: float, jobs: int) -> dict[str, Any]:
    """Returns what was found."""
    return {
        "seconds": round(seconds, 1),
        "processes": jobs,
        "states": sum(result.states for result in results),
        "moves": sum(result.moves for result in results),
        "violations": sum(result.counterexample is not None for result in results) + len(frame_violations),
        "invariants": [
            *(invariant.__name__ for invariant in (*TURN_INVARIANTS, *STATE_INVARIANTS)),
            "nobody_waits_for_ever",
            "the_core_never_raises",
        ],
        "configurations": [result.as_json() for result in results],
        "sequences_of_frames": {"length": _FRAMES, "violations": list(frame_violations)},
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Go through all states of the rendezvous core, and check each.")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="configurations with this in their name")
    parser.add_argument("--states", type=int, default=MOST_STATES, help=f"of each, at most [{MOST_STATES}]")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes [one a core]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results go")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    chosen = [c for c in CONFIGURATIONS if not options.only or any(name in c.name for name in options.only)]
    made, began, results = provenance("tests/prove/model_check/model_check.py"), time.perf_counter(), []
    frame_violations = [*wrongly_taken(_FRAMES), *wrongly_cut()]
    print("\n".join(frame_violations) or f"frames: every sequence of {_FRAMES} is refused but the genuine one")
    for result in search_all(chosen, options.states, options.jobs):
        report(result)
        results.append(result)
    seconds = time.perf_counter() - began
    found = [result for result in results if result.counterexample is not None]
    print(f"{sum(r.states for r in results)} states, {len(found)} violations, {seconds:.0f} s")
    if options.json is not None:
        body = {**made, **as_json(results, frame_violations, seconds, options.jobs)}
        options.json.write_text(json.dumps(body, indent=2) + "\n")
    return 1 if found or frame_violations else 0


if __name__ == "__main__":
    sys.exit(main())
