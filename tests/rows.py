"""Checks tests/README.md: each test that it names exists; with --ran, each has passed in that run.

python tests/rows.py                       # they exist
python tests/rows.py --ran REPORT.xml ...  # of pytest --junit-xml; skipped is not passed
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).parent
_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
_ANYTHING = re.compile(r"`([^`]*(?:::|\.py)[^`]*)`")


def rows(page: str) -> dict[str, list[tuple[str, str]]]:
    """Returns (file, test) of each line of the tables, by the line's first cell.

    Raises:
        ValueError: where a line names no test, or something that is none.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| ") or len(cells) != 2 or cells[0] == "---" or cells[1] == "shown by":
            continue
        row, tests = cells[0], _TEST.findall(cells[1])
        if not tests or len(tests) != len(_ANYTHING.findall(cells[1])):
            raise ValueError(f"{row}: names no test, or something that is none: {cells[1]}")
        if row in found:
            raise ValueError(f"{row}: is there twice")
        found[row] = tests
    return found


def missing(named: dict[str, list[tuple[str, str]]]) -> list[str]:
    """Returns the tests that do not exist, each with its line."""
    there: dict[str, set[str]] = {}
    for file in {file for tests in named.values() for file, _ in tests}:
        path = TESTS / file
        body = ast.parse(path.read_text()).body if path.exists() else []
        there[file] = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    return [f"{row}: {file}::{test}" for row, tests in named.items() for file, test in tests if test not in there[file]]


def not_passed(named: dict[str, list[tuple[str, str]]], reports: Iterable[Path]) -> list[str]:
    """Returns the tests of which no case has passed in these runs, and those of which one has failed."""
    passed, failed = set(), set()
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            test = (case.attrib["classname"].replace(".", "/") + ".py", case.attrib["name"].partition("[")[0])
            if case.find("failure") is not None or case.find("error") is not None:
                failed.add(test)
            elif case.find("skipped") is None:
                passed.add(test)
    return [
        f"{row}: {file}::{test}"
        for row, tests in named.items()
        for file, test in tests
        if ("tests/" + file, test) not in passed - failed
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks that the tests named by tests/README.md exist, or passed.")
    parser.add_argument("--ran", nargs="+", type=Path, metavar="REPORT.xml", help="reports of pytest --junit-xml")
    options = parser.parse_args()
    named = rows((TESTS / "README.md").read_text())
    wrong = missing(named) if options.ran is None else not_passed(named, options.ran)
    print("\n".join(wrong) or f"{len(named)} rows, {sum(map(len, named.values()))} tests: all are there")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
