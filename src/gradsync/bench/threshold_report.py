"""What a person reads of a sweep over thresholds: the table, the bar chart, the recommendation. Plain text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradsync.bench.thresholds import MEGABYTE, TOLERANCE, Row, best, recommend
from gradsync.bucketing.callback import DEFAULT_THRESHOLD_BYTES

_HEADINGS = ("threshold", "step", "quartiles", "all-reduces", "bus bandwidth", "pack only", "of step")
_BAR_CHARACTERS = 40


def megabytes(size_bytes: float) -> str:
    """Returns a size in units of 1024**2 bytes, small ones of 1024, with three digits or all before the point."""
    if size_bytes < MEGABYTE / 10:
        return f"{size_bytes / 1024:.3g} KB"
    value = size_bytes / MEGABYTE
    return f"{value:,.0f} MB" if value >= 1000 else f"{value:.3g} MB"


def milliseconds(seconds: float) -> str:
    """Returns a time in milliseconds, with three digits or all that stand before the point."""
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.3g} ms"


def table(rows: Sequence[Row]) -> str:
    """Returns the rows under headings, the columns aligned to the right."""
    cells = [_HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _cells(row: Row) -> tuple[str, ...]:
    lower, upper = row.seconds.lower_quartile, row.seconds.upper_quartile
    bus = row.bus_bytes_per_second
    return (
        megabytes(row.contender.threshold_bytes),
        milliseconds(row.seconds.median),
        f"{milliseconds(lower).removesuffix(' ms')} to {milliseconds(upper)}",
        str(row.contender.all_reduces),
        f"{bus / 1e9:.3g} GB/s" if bus and math.isfinite(bus) else "-",
        milliseconds(row.pack_seconds.median) if row.pack_seconds else "-",
        f"{100 * row.pack_share:.0f} %" if row.pack_share is not None else "-",
    )


def bar_chart(rows: Sequence[Row]) -> str:
    """Returns a bar for each row's time of a step, from 0; the recommended one is marked."""
    longest = max(row.seconds.median for row in rows)
    chosen = recommend(rows)
    names = [megabytes(row.contender.threshold_bytes) for row in rows]
    times = [milliseconds(row.seconds.median) for row in rows]
    lines = ["time of a step by threshold"]
    for row, name, shown in zip(rows, names, times, strict=True):
        length = round(_BAR_CHARACTERS * row.seconds.median / longest) if longest else 0
        bar = f"{name:>{max(map(len, names))}}  {'#' * max(length, 1):<{_BAR_CHARACTERS}}"
        mark = "  <- recommended" if row is chosen else ""
        lines.append(f"{bar}  {shown:>{max(map(len, times))}}{mark}")
    return "\n".join(lines)


def recommendation(rows: Sequence[Row]) -> str:
    """Returns which threshold to take, why, how to write it, and how far the timings carry."""
    chosen, fastest = recommend(rows), best(rows)
    threshold = chosen.contender.threshold_bytes
    lines = [
        f"Recommended threshold: {megabytes(threshold)}, the smallest within {100 * TOLERANCE:.0f} % of the fastest "
        f"({megabytes(fastest.contender.threshold_bytes)}, {milliseconds(fastest.seconds.median)} per step)."
    ]
    lines.append(f"  gs.AllreduceCallback(threshold_bytes={_as_code(threshold)})" + _is_default(threshold))
    if fastest.seconds.spread > TOLERANCE:
        alike = [row for row in rows if row.seconds.median <= fastest.seconds.upper_quartile]
        lines.append(
            f"The quartiles of the fastest lie {100 * fastest.seconds.spread:.0f} % apart; within them "
            f"{_how_many(alike, rows)}. A quieter machine, or more --steps, would tell more."
        )
    return "\n".join(lines)


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
    return f"do alike: {', '.join(megabytes(row.contender.threshold_bytes) for row in alike)}"


def _as_code(size_bytes: int) -> str:
    for unit, factor in (("1024**2", MEGABYTE), ("1024", 1024)):
        if size_bytes % factor == 0:
            return f"{size_bytes // factor} * {unit}"
    return str(size_bytes)


def _is_default(threshold_bytes: int) -> str:
    return "  # the default" if threshold_bytes == DEFAULT_THRESHOLD_BYTES else ""
