"""What the reports of measurements share: aligned columns, bars, units, paragraphs. Plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

MEGABYTE = 1024**2
_BAR_CHARACTERS = 40


def megabytes(size_bytes: float) -> str:
    """Returns a size in units of 1024**2 bytes, small ones of 1024 or 1, with three digits or all before the point."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    if size_bytes < MEGABYTE / 10:
        return f"{size_bytes / 1024:.3g} KB"
    value = size_bytes / MEGABYTE
    return f"{value:,.0f} MB" if value >= 1000 else f"{value:.3g} MB"


def milliseconds(seconds: float) -> str:
    """Returns a time in milliseconds, with three digits or all that stand before the point."""
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.3g} ms"


def columns(lines: Sequence[Sequence[str]]) -> str:
    """Returns lines of cells, the columns aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def bars(title: str, names: Sequence[str], values: Sequence[float], shown: Sequence[str], marks: Sequence[str]) -> str:
    """Returns a bar for each value, from 0.

    Args:
        title: the first line.
        names: left of the bars.
        values: as long as which the bars are.
        shown: the values as text, right of the bars.
        marks: what else stands there; "" for nothing.
    """
    longest = max(values)
    lines = [title]
    for name, value, text, mark in zip(names, values, shown, marks, strict=True):
        length = round(_BAR_CHARACTERS * value / longest) if longest else 0
        bar = f"{name:>{max(map(len, names))}}  {'#' * max(length, 1):<{_BAR_CHARACTERS}}"
        lines.append(f"{bar}  {text:>{max(map(len, shown))}}{f'  {mark}' if mark else ''}")
    return "\n".join(lines)


def wrapped(text: str) -> str:
    """Returns a paragraph in lines that fit a terminal."""
    return textwrap.fill(text, width=79, break_on_hyphens=False)
