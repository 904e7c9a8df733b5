"""Runs the tests that need a GPU, and writes how each ended, with the machine and the versions.

    python benchmarks/gpu_tests.py            # writes benchmarks/results/gpu_tests.json
    python benchmarks/gpu_tests.py -k nccl    # some of them; writes nothing

Without a GPU all of them skip, with a reason, and nothing is written. Each test has 30 seconds, whatever limit it has
elsewhere, and all together 8 minutes. The contract suite comes first, then the others; tests of fewer ranks come before
those of more. Tests that the 8 minutes do not reach are skipped and counted. The exit code is pytest's, or 1 where
tests were not reached. Ranks that share a GPU take turns on it: nobody knows yet how many tests 8 minutes hold.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from measurement import provenance, write_result

FOLDER = Path(__file__).parent
TEST_SECONDS = 30
ALL_SECONDS = 480


class Results:
    """A plugin of pytest that orders the tests, ends each in time, and records how it ended."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.not_reached = 0
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._began

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=_place_in_order)
        for item in items:
            item.add_marker(pytest.mark.timeout(TEST_SECONDS), append=False)  # before the marks that it has

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self.seconds > ALL_SECONDS and not any(mark.name == "skip" for mark in item.iter_markers()):
            self.not_reached += 1
            pytest.skip(f"not reached within {ALL_SECONDS} s")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.rows.append({"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)})


def _place_in_order(item: pytest.Item) -> tuple[bool, int]:
    values = getattr(item, "callspec", None)
    return "test_contract.py" not in item.nodeid, 1 if values is None else values.params.get("world_size", 1)


def main() -> int:
    results = Results()
    tests = ["tests", "tests/prove/benchmarks/test_smoke.py"]
    code = int(pytest.main(["-m", "gpu", "-rs", *tests, *sys.argv[1:]], plugins=[results]))
    has_run = any(row["outcome"] != "skipped" for row in results.rows)
    if has_run and len(sys.argv) == 1:
        sys.path.insert(0, str(FOLDER))
        from on_gpu import hardware

        made = provenance("benchmarks/gpu_tests.py")
        made["machine"]["gpu"] = hardware.gpu()
        made["versions"] |= hardware.versions()
        found = {"seconds": round(results.seconds, 1), "not_reached": results.not_reached, "rows": results.rows}
        write_result("gpu_tests", None, {**made, **found})
    if results.not_reached:
        print(f"gpu_tests: {results.not_reached} tests were not reached within {ALL_SECONDS} s", file=sys.stderr)
    return code or int(results.not_reached > 0)


if __name__ == "__main__":
    sys.exit(main())
