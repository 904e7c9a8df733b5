"""Which collective has been right on which communicator for which dtype: the table of the README."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

#: A column for each class of dtypes.
CLASSES = {
    "floating": ("float16", "bfloat16", "float32", "float64"),
    "complex": ("complex64", "complex128"),
    "integers": ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    "bool": ("bool",),
    "datetime64, structured, foreign byte order, text": ("datetime64", "structured", "foreign byte order", "text"),
}
_OPERATORS = ("sum", "mean", "prod", "min", "max")

#: dtype -> operators; none for what does not compute.
Dtypes = dict[str, list[str]]


def coverage(results: dict[str, Any]) -> list[str]:
    """Returns the lines of a table with a line for each collective, and for communicators that differ in it."""
    communicators: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for row in results["results"]:
        ranks = f"{row['communicator']}, {_ranks(row['world_sizes'])}"
        for collective, dtypes in row["covered"].items():
            communicators.setdefault((collective, _cells(dtypes)), []).append(ranks)
    order = list(dict.fromkeys(collective for collective, _ in communicators))
    lines = [
        f"| collective | communicator | {' | '.join(CLASSES)} |",
        "| --- | --- |" + " --- |" * len(CLASSES),
    ]
    for (collective, cells), where in sorted(communicators.items(), key=lambda item: order.index(item[0][0])):
        lines.append(f"| {collective} | {'; '.join(where)} | {' | '.join(cells)} |")
    return lines


def _ranks(world_sizes: list[int]) -> str:
    """Returns e.g. "1 to 4 ranks"."""
    first, last = world_sizes[0], world_sizes[-1]
    is_range = len(world_sizes) > 1 and last - first + 1 == len(world_sizes)
    shown = f"{first} to {last}" if is_range else _listed(world_sizes)
    return f"{shown} rank{'' if last == 1 else 's'}"


def _cells(dtypes: Dtypes) -> tuple[str, ...]:
    *cells, last = [_cell(of_class, dtypes) for of_class in CLASSES.values()]
    without_class = dtypes.keys() - {name for of_class in CLASSES.values() for name in of_class}
    return (*cells, _listed(sorted(without_class)) or last)


def _cell(of_class: tuple[str, ...], dtypes: Dtypes) -> str:
    """Returns the operators that all dtypes of a class have; or the dtypes by name, where there are not all."""
    found = [name for name in of_class if name in dtypes]
    operators = {tuple(op for op in _OPERATORS if op in dtypes[name]) for name in found}
    if len(operators) > 1:
        return "; ".join(f"{name}: {_listed(op for op in _OPERATORS if op in dtypes[name])}" for name in found)
    shown = " ".join(*operators) if operators else ""
    if len(found) == len(of_class):
        return shown or "yes"
    return f"{_listed(found)}{f': {shown}' if shown else ''}"


def _listed(things: Iterable[object]) -> str:
    return ", ".join(map(str, things))
