"""The table of docs/collectives.md: what the contract has covered, from small results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from contract import HOST_ONLY_DTYPES
from contract_coverage import CLASSES, OPERATORS, OTHERS, coverage
from contract_suite import PARTS, checks_of
from coverage_table import covered
from gradsync.reduction import OPERATIONS_BY_DTYPE

_REDUCED = {name: list(OPERATORS[of_class]) for of_class, names in CLASSES.items() for name in names}
_NUMBERS: dict[str, list[str]] = {name: [] for name in _REDUCED}
_ALL = {**_NUMBERS, **{name: [] for name in OTHERS}}

ON_SHM = [[2, "numpy"], [3, "numpy"], [4, "numpy"]]
ON_NCCL = [[size, kit] for kit in ("cupy", "numpy") for size in (1, 2)]


def row(communicator: str, runs: list[list[Any]], of_collectives: dict[str, Any]) -> dict[str, Any]:
    return {"communicator": communicator, "part": "any", "runs": runs, "covered": of_collectives}


def cells(*rows: dict[str, Any]) -> list[str]:
    return coverage({"results": list(rows)})[4:]


def test_the_classes_are_those_of_the_library() -> None:
    declared = {name: {op.value for op in ops} for name, ops in OPERATIONS_BY_DTYPE.items()}
    assert declared == {name: set(ops) for name, ops in _REDUCED.items()}
    assert set(OTHERS) == set(HOST_ONLY_DTYPES)


def test_a_line_for_each_collective_and_a_column_for_each_communicator() -> None:
    lines = coverage(
        {
            "results": [
                row("local", [[1, "numpy"]], {"reduce": _REDUCED, "barrier": {"": []}}),
                row("shm", ON_SHM, {"reduce": _REDUCED, "gather": _ALL}),
                row("nccl", ON_NCCL, {"gather": _NUMBERS}),
            ]
        }
    )
    assert lines[0].startswith(
        "Run on local: 1 rank; shm: 2 to 4 ranks; nccl: 1, 2 ranks, device arrays and host arrays. Every reduction: "
        "float16, bfloat16, float32, float64: sum mean prod min max; complex64, complex128: sum mean prod; "
    )
    assert lines[0].endswith("Every dtype: those, and datetime64, structured, foreign byte order, text.")
    assert lines[1:] == [
        "",
        "| collective | local | shm | nccl |",
        "| --- | --- | --- | --- |",
        "| reduce | every reduction | every reduction |  |",
        "| barrier | yes |  |  |",
        "| gather |  | every dtype | every number |",
    ]


def test_runs_that_covered_less_are_told_apart() -> None:
    more, less = {"gather": _ALL}, {"gather": _NUMBERS}
    assert cells(row("shm", ON_SHM[:1], less), row("shm", ON_SHM[1:], more)) == [
        "| gather | every number (2 ranks); every dtype (3, 4 ranks) |"
    ]
    assert cells(row("nccl", ON_NCCL[:2], less), row("nccl", ON_NCCL[2:], more)) == [
        "| gather | every number (device arrays); every dtype (host arrays) |"
    ]
    assert cells(row("nccl", ON_NCCL[1:2], less), row("nccl", ON_NCCL[2:], more), row("nccl", ON_NCCL[:1], {})) == [
        "| gather | every number (device arrays, 2 ranks); every dtype (host arrays) |"
    ]
    assert cells(row("nccl", ON_NCCL[1::2], less), row("nccl", ON_NCCL[::2], {})) == [
        "| gather | every number (2 ranks) |"
    ]
    assert cells(row("nccl", ON_NCCL[1:], less), row("nccl", ON_NCCL[:1], {})) == [
        "| gather | every number (device arrays, 2 ranks; host arrays) |"
    ]


def test_dtypes_of_a_class_that_differ_are_told_apart() -> None:
    assert cells(row("shm", ON_SHM, {"reduce": {"complex64": ["sum"], "complex128": ["sum", "mean"]}})) == [
        "| reduce | complex64: sum; complex128: sum mean |"
    ]
    some = {**{name: ["max", "sum"] for name in CLASSES["floating"]}, "int8": ["sum", "max"], "bool": ["max"]}
    assert cells(row("shm", ON_SHM, {"reduce": some})) == ["| reduce | floating, int8: sum max; bool: max |"]
    assert cells(row("shm", ON_SHM, {"each": {"float32": []}})) == ["| each | float32 |"]


def test_what_is_no_array_is_named() -> None:
    assert cells(row("shm", ON_SHM, {"objects.gather": {"any that pickles": []}})) == [
        "| objects.gather | any that pickles |"
    ]


def test_notes_become_what_json_holds() -> None:
    notes = {("reduce", "int8", "sum"), ("reduce", "int8", "max"), ("gather", "bool", "")}
    assert covered(notes) == {"gather": {"bool": []}, "reduce": {"int8": ["max", "sum"]}}


def test_every_part_of_the_contract_has_checks() -> None:
    assert all(checks_of(part) for part in PARTS)
