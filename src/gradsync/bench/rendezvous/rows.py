"""What came out: of each contender and number of ranks, how long everything took. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradsync.bench.measurement import Seconds
from gradsync.bench.rendezvous.contenders import BARRIER, GET_ID, JOIN, PHASES, PUT_ID
from gradsync.bench.rendezvous.run import Run

#: What the columns are called, and which phases make them up.
STEPS: Mapping[str, tuple[str, ...]] = {"join": (JOIN,), "share an id": (PUT_ID, GET_ID), "barrier": (BARRIER,)}


@dataclass(frozen=True)
class Row:
    """One contender with so many ranks.

    Attributes:
        contender: its name.
        ranks: how many.
        server_start: from starting the server's process to its listening.
        connect: of one rank, until the kernel has connected it: the median rank of each run, by their median.
        steps: of all ranks together, by name.
        from_start: from starting the server's process until all have joined, the start of the ranks not counted.
        server_cpu: of the server, for all steps.
        lost: connections, in all runs together.
    """

    contender: str
    ranks: int
    server_start: Seconds
    connect: Seconds | None
    steps: Mapping[str, Seconds]
    from_start: Seconds
    server_cpu: Seconds
    lost: int


def row_of(contender: str, ranks: int, runs: Sequence[Run]) -> Row:
    """Sums up runs; at least one."""
    connects = [Seconds.of(run.connect_seconds).median for run in runs if run.connect_seconds]
    return Row(
        contender,
        ranks,
        Seconds.of([run.server_start_seconds for run in runs]),
        Seconds.of(connects) if connects else None,
        {name: Seconds.of([_wall(run, phases) for run in runs]) for name, phases in STEPS.items()},
        Seconds.of([run.server_start_seconds + _wall(run, (JOIN,)) for run in runs]),
        Seconds.of([sum(run.phases[phase].server_cpu_seconds for phase in PHASES) for run in runs]),
        sum(run.lost_connections for run in runs),
    )


def _wall(run: Run, phases: Sequence[str]) -> float:
    return sum(run.phases[phase].wall_seconds for phase in phases)


def as_dictionary(row: Row) -> dict[str, Any]:
    """Returns a row for JSON; all in seconds."""
    return {
        "contender": row.contender,
        "ranks": row.ranks,
        "server_start_seconds": vars(row.server_start),
        "connect_seconds_of_a_rank": vars(row.connect) if row.connect else None,
        **{f"{name.replace(' ', '_')}_seconds": vars(seconds) for name, seconds in row.steps.items()},
        "from_start_to_joined_seconds": vars(row.from_start),
        "server_cpu_seconds": vars(row.server_cpu),
        "lost_connections": row.lost,
    }
