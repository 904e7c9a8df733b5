"""What a person reads of a sweep over thresholds: the table, the bar chart, the recommendation. Plain text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradsync.bench.text import MEGABYTE, bars, columns, megabytes, milliseconds, wrapped
from gradsync.bench.thresholds import TOLERANCE, Row, best, recommend
from gradsync.bucketing.plan import DEFAULT_THRESHOLD_BYTES

_HEADINGS = ("threshold", "step", "quartiles", "all-reduces", "bus", "pack only", "of step")


def table(rows: Sequence[Row]) -> str:
    """Returns the rows under headings, the columns aligned to the right."""
    return columns([_HEADINGS, *(_cells(row) for row in rows)])


def _cells(row: Row) -> tuple[str, ...]:
    lower, upper = row.seconds.lower_quartile, row.seconds.upper_quartile
    bus = row.bus_bytes_per_second
    return (
        megabytes(row.contender.threshold_bytes),
        milliseconds(row.seconds.median),
        f"{milliseconds(lower).removesuffix(' ms')}-{milliseconds(upper)}",
        str(row.contender.all_reduces),
        f"{bus / 1e9:.3g} GB/s" if bus and math.isfinite(bus) else "-",
        milliseconds(row.pack_seconds.median) if row.pack_seconds else "-",
        f"{100 * row.pack_share:.0f} %" if row.pack_share is not None else "-",
    )


def bar_chart(rows: Sequence[Row]) -> str:
    """Returns a bar for each row's time of a step, from 0; the recommended one is marked."""
    chosen = recommend(rows)
    return bars(
        "time of a step by threshold",
        [megabytes(row.contender.threshold_bytes) for row in rows],
        [row.seconds.median for row in rows],
        [milliseconds(row.seconds.median) for row in rows],
        ["<- recommended" if row is chosen and len(rows) > 1 else "" for row in rows],
    )


def recommendation(rows: Sequence[Row]) -> str:
    """Returns which threshold to take, why, how to write it, and how far the timings carry."""
    if len(rows) == 1:
        return wrapped(
            f"Nothing to choose: the thresholds all make the same {rows[0].contender.all_reduces} bucket(s) of these "
            "gradients, or there is only one of them. --thresholds names others."
        )
    chosen, fastest = recommend(rows), best(rows)
    threshold, percent = chosen.contender.threshold_bytes, f"{100 * TOLERANCE:.0f} %"
    time = f"{milliseconds(fastest.seconds.median)} per step"
    why = f"the fastest ({time}); no smaller one comes within {percent} of it"
    if chosen is not fastest:
        why = f"the smallest within {percent} of the fastest ({megabytes(fastest.contender.threshold_bytes)}, {time})"
    lines = [
        wrapped(f"Recommended threshold: {megabytes(threshold)}, {why}."),
        f"  gs.AllreduceCallback(threshold_bytes={_as_code(threshold)}){_is_default(threshold)}",
    ]
    if fastest.seconds.spread > TOLERANCE:
        alike = [row for row in rows if row.seconds.median <= fastest.seconds.upper_quartile]
        lines.append(
            wrapped(
                f"The quartiles of the fastest lie {100 * fastest.seconds.spread:.0f} % apart; "
                f"within them {_how_many(alike, rows)}. A quieter machine, or more --steps, would tell more."
            )
        )
    return "\n".join(lines)


def notes(rows: Sequence[Row]) -> str:
    """Returns what the table cannot say: thresholds that stand for others, and a share of packing above the whole."""
    lines = [same_buckets(rows)]
    if any(row.pack_share is not None and row.pack_share > 1 for row in rows):
        lines.append(
            wrapped(
                "Packing alone, into a buffer of its own, takes longer than some steps: the communicator packs "
                "gradients on their way, and spares that buffer."
            )
        )
    return "\n".join(filter(None, lines))


def same_buckets(rows: Sequence[Row]) -> str:
    """Returns which thresholds were not measured, because a smaller one makes the same buckets; "" if none."""
    lines = []
    for row in rows:
        if row.contender.same_buckets:
            others = ", ".join(megabytes(size) for size in row.contender.same_buckets)
            lines.append(
                f"Not measured: {others}; the buckets are those of {megabytes(row.contender.threshold_bytes)}."
            )
    return "\n".join(lines)


def _how_many(alike: Sequence[Row], rows: Sequence[Row]) -> str:
    if len(alike) == len(rows):
        return "all thresholds do alike"
    *others, last = (megabytes(row.contender.threshold_bytes) for row in alike)
    return f"{', '.join(others)} and {last} do alike" if others else f"{last} is alone"


def _as_code(size_bytes: int) -> str:
    for unit, factor in (("1024**2", MEGABYTE), ("1024", 1024)):
        if size_bytes % factor == 0:
            return f"{size_bytes // factor} * {unit}"
    return str(size_bytes)


def _is_default(threshold_bytes: int) -> str:
    return "  # the default" if threshold_bytes == DEFAULT_THRESHOLD_BYTES else ""
