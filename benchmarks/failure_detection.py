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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from failures.observation import DOWN, RAISED, REPORTED, Result, Row, observe
from failures.rows import rows
from measurement import add_output, provenance, write_result

FOLDER = Path(__file__).parent
ROUNDS = 5
TABLE_WIDTH = 150  # of a log, without a terminal


def chosen(all_rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """Returns the rows with one of these words in their name; all rows if there are no words."""
    return [row for row in all_rows if not names or any(name in row.name for name in names)]


def table_of(results: Sequence[Result]) -> Table:
    """Returns a line for each measured moment, without moments that have no target and add nothing."""
    table = Table(title="From the failure until it is told, and until all is down: seconds")
    for heading in ("failure", "phase"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ranks", "until", "median", "worst", "target", "met", "culprit\nnamed", "left\nbehind"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        for line in _lines_of(result):
            table.add_row(*line)
    return table


def _lines_of(result: Result) -> Iterator[tuple[str, ...]]:
    row = result.row
    head = (row.failure, row.phase, str(row.ranks))
    if result.skipped is not None:
        yield (*head, "skipped", "", "", "", "", "", "")
        return
    tail = ("[red]NO[/red]" if result.complaints else "yes", str(len(set(result.left_behind))))
    for what in _shown(result):
        summary = result.summary(what)
        figures = ("", "", "", "") if summary is None else _figures(summary)
        yield (*head, what, *figures, *tail)
        head, tail = ("", "", ""), ("", "")


def _shown(result: Result) -> list[str]:
    measured = [what for what in (RAISED, REPORTED, DOWN) if result.summary(what) is not None]
    with_target = [what for what in measured if result.row.target(what) is not None]
    return with_target or measured[:1] or [DOWN]


def _figures(summary: dict[str, Any]) -> tuple[str, str, str, str]:
    target, met = summary["target_seconds"], summary["met"]
    verdict = {None: "", True: "yes", False: "[yellow]no[/yellow]"}[met]
    shown_target = "" if target is None else f"{target:g}"
    return f"{summary['median_seconds']:.3f}", f"{summary['worst_seconds']:.3f}", shown_target, verdict


def tell_what_is_wrong(results: Sequence[Result], console: Console) -> None:
    for result in results:
        if result.skipped is not None:
            console.print(f"{result.row.name} skipped: {result.skipped}", markup=False, highlight=False, soft_wrap=True)
        for what in result.missed:  # printed, and no failure of this command: a busy machine misses them, too
            console.print(f"{result.row.name}: {what} later than its target", markup=False, highlight=False)
        for text in dict.fromkeys(result.complaints + [f"left {thing}" for thing in result.left_behind]):
            console.print(f"{result.row.name}: {text}", markup=False, highlight=False, soft_wrap=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time how fast each failure is told, and see what is left behind.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of each failure [{ROUNDS}]")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="rows with this in their name")
    parser.add_argument("--large", action="store_true", help="also return 1 GiB from a rank")
    parser.add_argument("--list", action="store_true", help="list the rows' names, and end")
    add_output(parser, "failure_detection")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    wanted = chosen(rows(large=options.large), options.only)
    if options.list or not wanted:
        print("\n".join(row.name for row in rows(large=True)))
        return 0 if options.list else 2
    # Children inherit an ignored signal: SIGINT of a background process, SIGHUP under nohup.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that a scene ends properly
    made = provenance("benchmarks/failure_detection.py")
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    results = []
    observe(wanted[0], 1)  # warms up: the first to read the files of the library would count that, too
    for row in wanted:
        results.append(observe(row, options.rounds))
        console.print(f"{len(results)}/{len(wanted)} {row.name}", highlight=False)
    console.print(table_of(results))
    tell_what_is_wrong(results, console)
    result = {**made, "settings": {"rounds": options.rounds}, "results": [each.as_json() for each in results]}
    write_result("failure_detection", options.output, result, is_whole=not options.only)
    return 0 if all(result.is_good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
