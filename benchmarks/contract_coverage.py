"""The table of docs/collectives.md: which collectives were right on which communicator, for which dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

CLASSES = {
    "floating": ("float16", "bfloat16", "float32", "float64"),
    "complex": ("complex64", "complex128"),
    "integers": ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    "bool": ("bool",),
}
OPERATORS = {
    "floating": ("sum", "mean", "prod", "min", "max"),
    "complex": ("sum", "mean", "prod"),
    "integers": ("sum", "prod", "min", "max"),
    "bool": ("min", "max"),
}
#: Dtypes that no reduction takes.
OTHERS = ("datetime64", "structured", "foreign byte order", "text")
KITS = {"numpy": "host arrays", "cupy": "device arrays"}

#: dtype -> operators; none for what does not compute. Without a dtype: what moves no array.
Dtypes = dict[str, list[str]]
#: World size and kit.
Run = tuple[int, str]

_ORDER = OPERATORS["floating"]
_REDUCTIONS = {name: OPERATORS[of_class] for of_class, names in CLASSES.items() for name in names}
#: What the legend explains.
_SHORT = {
    "every reduction": _REDUCTIONS,
    "every dtype": dict.fromkeys((*_REDUCTIONS, *OTHERS), ()),
    "every number": dict.fromkeys(_REDUCTIONS, ()),
    "yes": {"": ()},
}


def coverage(results: dict[str, Any]) -> list[str]:
    """Returns the runs in words, and a table with a line for each collective and a column for each communicator."""
    runs: dict[str, list[Run]] = {}
    cells: dict[str, dict[str, dict[str, list[Run]]]] = {}  # collective -> communicator -> what -> where
    parts = list(dict.fromkeys(row["part"] for row in results["results"]))
    for row in sorted(results["results"], key=lambda row: parts.index(row["part"])):
        of_row: list[Run] = [(world_size, kit) for world_size, kit in row["runs"]]
        known = runs.setdefault(row["communicator"], [])
        known += [run for run in of_row if run not in known]
        for collective, dtypes in row["covered"].items():
            of_collective = cells.setdefault(collective, {}).setdefault(row["communicator"], {})
            of_collective.setdefault(_in_words(dtypes), []).extend(of_row)
    lines = [f"| collective | {' | '.join(runs)} |", "| --- |" + " --- |" * len(runs)]
    for collective, of_collective in cells.items():
        shown = [_cell(of_collective.get(communicator, {}), runs[communicator]) for communicator in runs]
        lines.append(f"| {collective} | {' | '.join(shown)} |")
    return [_legend(runs), "", *lines]


def _legend(runs: dict[str, list[Run]]) -> str:
    ran = "; ".join(f"{communicator}: {_all_of(of_communicator)}" for communicator, of_communicator in runs.items())
    reductions = "; ".join(f"{_listed(names)}: {_spaced(OPERATORS[of])}" for of, names in CLASSES.items())
    return (
        f'The tests ran on these communicators: {ran}. "Every reduction" means these dtypes and operators: '
        f'{reductions}. "Every number" means these dtypes, without an operator. "Every dtype" means these dtypes and '
        f"{_listed(OTHERS)}."
    )


def _all_of(runs: Sequence[Run]) -> str:
    """Returns e.g. "1 to 4 ranks, device arrays and host arrays"."""
    kits = [KITS[kit] for kit in dict.fromkeys(kit for _, kit in runs)]
    ranks = _ranks(runs)
    return f"{ranks}, {' and '.join(kits)}" if len(kits) > 1 else ranks


def _cell(of_what: dict[str, list[Run]], runs: Sequence[Run]) -> str:
    """Returns the right cases, followed by their runs, unless these are all runs."""
    return "; ".join(what + _where(where, runs) for what, where in of_what.items())


def _where(where: Sequence[Run], runs: Sequence[Run]) -> str:
    """Returns e.g. " (host arrays, 2 to 4 ranks)"; "" for all runs."""
    kits = list(dict.fromkeys(kit for _, kit in runs))
    ranks_of = {}
    for kit in kits:
        mine, every = _sizes(where, kit), _sizes(runs, kit)
        if mine:
            ranks_of[kit] = [] if mine == every else [_ranks(where, kit)]
    if len(ranks_of) == len(kits) and len({tuple(ranks) for ranks in ranks_of.values()}) == 1:
        shown = _listed(ranks_of[kits[0]])
    else:
        shown = "; ".join(_listed([KITS[kit], *ranks]) for kit, ranks in ranks_of.items())
    return f" ({shown})" if shown else ""


def _sizes(runs: Sequence[Run], kit: str | None = None) -> list[int]:
    return sorted({world_size for world_size, of in runs if kit in (None, of)})


def _ranks(runs: Sequence[Run], kit: str | None = None) -> str:
    """Returns e.g. "1 to 4 ranks"."""
    sizes = _sizes(runs, kit)
    first, last = sizes[0], sizes[-1]
    is_range = len(sizes) > 2 and last - first + 1 == len(sizes)
    return f"{f'{first} to {last}' if is_range else _listed(sizes)} rank{'' if last == 1 else 's'}"


def _in_words(dtypes: Dtypes) -> str:
    """Returns the legend's word for the dtypes by operators, or else the dtypes, shortened to classes."""
    ordered = {dtype: tuple(op for op in _ORDER if op in operators) for dtype, operators in dtypes.items()}
    for name, whole in _SHORT.items():
        if ordered == whole:
            return name
    by_operators: dict[tuple[str, ...], list[str]] = {}
    for dtype in sorted(ordered, key=[*_REDUCTIONS, *OTHERS, *ordered].index):
        by_operators.setdefault(ordered[dtype], []).append(dtype)
    return "; ".join(
        f"{_listed(_classes(names))}{f': {_spaced(operators)}' if operators else ''}"
        for operators, names in by_operators.items()
    )


def _classes(names: Sequence[str]) -> list[str]:
    """Returns the names of dtypes, with one name for a class of which all are there."""
    shown: list[str] = []
    for name in names:
        whole = next((c for c, of in CLASSES.items() if name in of and set(of) <= set(names)), name)
        shown += [whole] if whole not in shown else []
    return shown


def _listed(things: Iterable[object]) -> str:
    return ", ".join(map(str, things))


def _spaced(operators: Iterable[str]) -> str:
    return " ".join(operators)
