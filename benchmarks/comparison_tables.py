"""Tables of measurements beside the peers, for docs/performance.md and the README."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from typing import Any

from peers import contenders

_Found = dict[str, Any]  # a row of the results

# A column for each system, and its name in the rows of single arrays and of lists of parameters.
SYSTEMS = {
    "gradsync": ("gradsync",),
    "DDP on gloo": ("DDP's start-up broadcast on gloo",),
    "gloo": ("gloo",),
    "Open MPI": ("Open MPI", "Open MPI per tensor"),
    "MPICH": ("MPICH", "MPICH per tensor"),
}
# A column for each way to synchronise a list of gradients, and the contenders that share its cells.
WAYS = {
    "gradsync": (contenders.GRADSYNC,),
    "gradsync, bucket views": (contenders.IN_BUCKETS,),
    "by hand": (contenders.BY_HAND,),
    "local copy": (contenders.LOCAL_COPY,),
    "DDP": (contenders.DDP,),
    "DDP, bucket views": (contenders.DDP_VIEWS,),
    "gloo": (contenders.GLOO_BUCKETS,),
    "Open MPI, each / flat": (contenders.OPENMPI_PER_TENSOR, contenders.OPENMPI_FLAT),
    "MPICH, each / flat": (contenders.MPICH_PER_TENSOR, contenders.MPICH_FLAT),
}


def comparison(results: _Found) -> list[str]:
    """Returns a table with a line for each workload and a column for each system that was measured."""
    by_workload: dict[str, dict[str, str]] = {}
    for found in results["rows"]:
        beside_busy = found["workload"].endswith("busy cores")
        if beside_busy == (found["state"] == "busy"):  # the idle half of that one is shown already
            by_workload.setdefault(found["workload"], {})[found["contender"]] = _milliseconds(found)
    cells = {
        workload: [next((of_workload[c] for c in names if c in of_workload), "") for names in SYSTEMS.values()]
        for workload, of_workload in by_workload.items()
    }
    return _table("milliseconds", SYSTEMS, cells)


def lists(results: _Found) -> list[str]:
    """Returns the lines of a table with a line for each list and state of the cores, and a column for each way."""
    cells = {}
    for (workload, state), of_workload in _by_workload(results).items():
        if contenders.BY_HAND in of_workload:
            name = workload if state == "idle" else f"{workload}, busy cores"
            times = [[_milliseconds(of_workload[c]) for c in names] for names in WAYS.values()]
            cells[name] = [" / ".join(filter(None, of_way)) for of_way in times]
    return _table("milliseconds", WAYS, cells)


def thresholds(results: _Found) -> list[str]:
    """Returns the lines of a table with a line for each list and a column for each threshold."""
    cells = {
        workload.partition(",")[0]: [_milliseconds(of_workload[setting]) for setting in contenders.THRESHOLDS]
        for (workload, _), of_workload in _by_workload(results).items()
        if contenders.THRESHOLDS.keys() <= of_workload.keys()
    }
    return _table("milliseconds", [setting.removeprefix("threshold ") for setting in contenders.THRESHOLDS], cells)


#: Names of contenders as the page shows them.
_OPTIONS = {
    contenders.NONFINITE: 'nonfinite="raise"',
    contenders.NORM: 'clip_norm=float("inf")',
    contenders.CLIPPED: "clip_norm, reached in each step",
    contenders.PARAMETERS: "parameters=",
}


def knobs(results: _Found) -> list[str]:
    """Returns the lines of a table with a line for each knob, and its step beside the plain one."""
    shown = {"default options": contenders.GRADSYNC, **{_OPTIONS.get(knob, knob): knob for knob in contenders.KNOBS}}
    cells = {
        name: [
            _milliseconds(found[contender]),
            f"{_median(found[contender]) / _median(found[contenders.GRADSYNC]):.2f}",
        ]
        for found in _by_workload(results).values()
        if contenders.KNOBS[0] in found
        for name, contender in shown.items()
    }
    return _table("ResNet-50 with", ["milliseconds", "divided by default options"], cells)


def _by_workload(results: _Found) -> dict[tuple[str, str], dict[str, _Found]]:
    """Returns the rows by workload and state of the cores, and then by contender."""
    found: dict[tuple[str, str], dict[str, _Found]] = {}
    for row in results["rows"]:
        found.setdefault((row["workload"], row["state"]), {})[row["contender"]] = row
    return found


def _table(corner: str, columns: Iterable[str], cells: dict[str, list[str]]) -> list[str]:
    """Returns the lines of a table of those columns in which some line has a cell."""
    shown = [any(column) for column in zip(*cells.values(), strict=True)]
    lines = [f"| {corner} | {' | '.join(compress(columns, shown))} |", "| --- |" + " --- |" * sum(shown)]
    return lines + [f"| {name} | {' | '.join(compress(of_line, shown))} |" for name, of_line in cells.items()]


def _milliseconds(found: _Found) -> str:
    """Returns a cell: the median, or that the system has no such collective; "" if it was not installed."""
    if found["seconds"]:
        return f"{1e3 * _median(found):.3g}"
    return "not offered" if found["status"] == "not offered" else ""


def _median(found: _Found) -> float:
    median: float = found["seconds"]["median"]
    return median
