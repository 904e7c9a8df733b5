"""What a person reads: the table, and a chart of how long it takes until all have joined."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.bench.rendezvous.rows import STEPS, Row
from gradsync.bench.text import bars, columns, milliseconds, wrapped

_HEADINGS = ("ranks", "server", "server up", "connect", *STEPS, "start to joined", "server's CPU", "lost")

EXPLANATION = wrapped(
    "server up: from starting its process to listening, for TCPStore most of it the import of PyTorch. connect: one "
    "rank, until the kernel has connected it (the median rank). join: from the first rank's dialling until all know "
    "that all have come, gradsync's having proved who they are; share an id: rank 0 hands in 128 bytes, all others "
    "fetch them; barrier: of all. These are of all ranks together, which share this machine's cores with the server."
)


def table(rows: Sequence[Row]) -> str:
    """Returns the rows under headings."""
    return columns([_HEADINGS, *(_cells(row) for row in rows)])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        f"{row.ranks:,}",
        row.contender,
        milliseconds(row.server_start.median),
        milliseconds(row.connect.median) if row.connect else "-",
        *(milliseconds(seconds.median) for seconds in row.steps.values()),
        milliseconds(row.from_start.median),
        milliseconds(row.server_cpu.median),
        f"{row.lost:,}",
    )


def chart(rows: Sequence[Row]) -> str:
    """Returns a bar for each row's join, from 0."""
    several = len({row.contender for row in rows}) > 1
    names = [f"{row.ranks:,} ranks" + (f"  {row.contender}" if several else "") for row in rows]
    joins = [row.steps["join"].median for row in rows]
    return bars("join of all ranks", names, joins, [milliseconds(seconds) for seconds in joins], [""] * len(rows))
