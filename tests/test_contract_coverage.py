"""The README's table of what the contract has covered, from small results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from contract_coverage import CLASSES, coverage
from contract_suite import PARTS, checks_of
from coverage_table import covered

_FLOATING = {name: ["max", "sum"] for name in CLASSES["floating"]}


def row(communicator: str, world_sizes: list[int], of_collectives: dict[str, Any]) -> dict[str, Any]:
    return {"communicator": communicator, "part": "any", "world_sizes": world_sizes, "covered": of_collectives}


def cells(*rows: dict[str, Any]) -> list[str]:
    return coverage({"results": list(rows)})[2:]


def test_communicators_with_the_same_coverage_share_a_line() -> None:
    same = {"reduce": {**_FLOATING, "bool": ["max"]}}
    assert cells(row("local", [1], same), row("shm", [1, 2, 3], same)) == [
        "| reduce | local, 1 rank; shm, 1 to 3 ranks | sum max |  |  | max |  |"
    ]


def test_a_communicator_that_covers_less_has_a_line_of_its_own() -> None:
    less: Any = {"gather": {"float32": [], "bool": []}}
    more: Any = {"gather": {**{name: [] for name in _FLOATING}, "bool": [], "text": []}}
    other = {"scatter": {"bool": []}}
    assert cells(row("shm", [1], more), row("nccl", [1, 2, 4], less), row("nccl", [2], other)) == [
        "| gather | shm, 1 rank | yes |  |  | yes | text |",
        "| gather | nccl, 1, 2, 4 ranks | float32 |  |  | yes |  |",
        "| scatter | nccl, 2 ranks |  |  |  | yes |  |",
    ]


def test_dtypes_of_a_class_that_differ_are_told_apart() -> None:
    assert cells(row("shm", [2], {"reduce": {"complex64": ["sum"], "complex128": ["sum", "mean"]}})) == [
        "| reduce | shm, 2 ranks |  | complex64: sum; complex128: sum, mean |  |  |  |"
    ]
    assert cells(row("shm", [2], {"reduce": {"complex64": ["sum"]}})) == [
        "| reduce | shm, 2 ranks |  | complex64: sum |  |  |  |"
    ]


def test_what_is_no_array_is_named() -> None:
    assert cells(row("shm", [2], {"objects.gather": {"any that pickles": []}})) == [
        "| objects.gather | shm, 2 ranks |  |  |  |  | any that pickles |"
    ]


def test_notes_become_what_json_holds() -> None:
    notes = {("reduce", "int8", "sum"), ("reduce", "int8", "max"), ("gather", "bool", "")}
    assert covered(notes) == {"gather": {"bool": []}, "reduce": {"int8": ["max", "sum"]}}


def test_every_part_of_the_contract_has_checks() -> None:
    assert all(checks_of(part) for part in PARTS)
