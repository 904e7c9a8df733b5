"""Causes each failure of a run, and measures how soon it is reported, by whom, and what is left behind.

    python benchmarks/failure_detection.py                        # writes benchmarks/results/failure_detection.json
    python benchmarks/failure_detection.py --only killed --rounds 1  # rows with that in their name; writes nothing

Three moments are measured, each from that of the failure: "raised", when the last rank that needs to know has caught
an error of ours; "reported", when the launcher has printed who was the culprit; and "down", when the last process has
ended. A row counts with its worst round. The exit code is 1 when a culprit was not named, or something was left
behind; a time above its target is only shown.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from failures.observation import observe
from failures.rows import rows
from measurement import add_output, provenance, write_result

FOLDER = Path(__file__).parent
ROUNDS = 5


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time how fast each failure is told, and see what is left behind.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of each failure [{ROUNDS}]")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="rows with this in their name")
    add_output(parser, "failure_detection")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    wanted = [row for row in rows() if not options.only or any(name in row.name for name in options.only)]
    if not wanted:
        print("the rows are:", *(row.name for row in rows()), sep="\n")
        return 2
    # Children inherit an ignored signal: SIGINT of a background process, SIGHUP under nohup.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that a scene ends properly
    made = provenance("benchmarks/failure_detection.py")
    results = []
    observe(wanted[0], 1)  # warms up: the first to read the files of the library would count that, too
    for row in wanted:
        results.append(observe(row, options.rounds))
        print(f"{len(results)}/{len(wanted)} {row.name}", *results[-1].problems(), sep="\n", flush=True)
    result = {**made, "settings": {"rounds": options.rounds}, "results": [each.as_json() for each in results]}
    write_result("failure_detection", options.output, result, is_whole=not options.only)
    return 0 if all(result.is_good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
