"""Rows and verdicts as tables for a terminal."""

from __future__ import annotations

from rich.table import Table

from peers.contenders import GRADSYNC
from peers.memory_mode import FAST, SLOW
from peers.rows import Row
from peers.targets import Verdict
from peers.workload import IDLE

MOST_NAMES = 3


def table_of(rows: list[Row]) -> Table:
    """Returns the rows of one workload."""
    table = Table(title=f"{rows[0].workload}: milliseconds of the slowest rank")
    table.add_column("contender", no_wrap=True)
    for heading in ("median", "quartiles", "mean", "rounds", "fast memory", "slow memory", "/ gradsync"):
        table.add_column(heading, justify="right")
    ours = {row.state: row for row in rows if row.contender == GRADSYNC}
    for row in rows:
        what = row.contender if len(ours) == 1 else f"{row.contender}, {row.state}"
        table.add_row(what, *(_cells(row, ours[row.state]) if row.seconds else (row.status,)))
    return table


def _cells(row: Row, ours: Row) -> tuple[str, ...]:
    seconds = row.seconds
    return (
        _milliseconds(seconds.median),
        f"{_milliseconds(seconds.lower_quartile)} .. {_milliseconds(seconds.upper_quartile)}",
        _milliseconds(row.mean_seconds),
        str(seconds.samples),
        *(_milliseconds(row.median(mode)) for mode in (FAST, SLOW)),
        f"{seconds.median / ours.seconds.median:.2f}",
    )


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3g}"


def table_of_verdicts(verdicts: list[Verdict]) -> Table:
    """Returns every target and whether it was met."""
    table = Table(title="Targets: one median over the others', of several the fastest")
    for heading in ("workload", "contender", "against"):
        table.add_column(heading)
    for heading in ("ratio", "of means", "must", "reach"):
        table.add_column(heading, justify="right")
    for verdict in verdicts:
        target = verdict.target
        against_state = f" ({target.against_state})" if target.against_state != target.state else ""
        table.add_row(
            target.workload,
            target.contender + (f" ({target.state})" if target.state != IDLE else ""),
            (_names(target.against) + against_state) if target.against else target.unit,
            "not measured" if verdict.ratio is None else f"{verdict.ratio:.2f}",
            "" if verdict.ratio_of_means is None else f"{verdict.ratio_of_means:.2f}",
            _limit(target.must, verdict.must_kept),
            _limit(target.reach, verdict.reach_kept),
        )
    return table


def _names(contenders: tuple[str, ...]) -> str:
    return ", ".join(contenders) if len(contenders) <= MOST_NAMES else f"the best of {len(contenders)}"


def _limit(limit: float | None, kept: bool | None) -> str:
    if limit is None:
        return ""
    return f"<= {limit:.2f} " + {None: "?", True: "yes", False: "[red]NO[/red]"}[kept]
