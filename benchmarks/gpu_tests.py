"""Runs the tests that need a GPU, and writes how each ended, with the machine and the versions.

    python benchmarks/gpu_tests.py            # writes benchmarks/results/gpu_tests.json
    python benchmarks/gpu_tests.py -k nccl    # some of them; writes nothing

Without a GPU all of them skip, with a reason, and nothing is written. Each test has 30 seconds, all together 8 minutes;
the exit code is pytest's, or 1 where that was too short.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from measurement import provenance

FOLDER = Path(__file__).parent
TEST_SECONDS = 30
ALL_SECONDS = 480


class Results:
    """A plugin of pytest that notes how each test has ended."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.rows.append({"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)})


def main() -> int:
    results, began = Results(), time.monotonic()
    tests = ["tests", "tests/prove/benchmarks/test_smoke.py"]
    limits = ["--timeout", str(TEST_SECONDS)]
    code = int(pytest.main(["-m", "gpu", "-rs", *limits, *tests, *sys.argv[1:]], plugins=[results]))
    seconds = time.monotonic() - began
    has_run = any(row["outcome"] != "skipped" for row in results.rows)
    if has_run and len(sys.argv) == 1:
        sys.path.insert(0, str(FOLDER))
        from on_gpu import hardware

        made = provenance("benchmarks/gpu_tests.py")
        made["machine"]["gpu"] = hardware.gpu()
        made["versions"] |= hardware.versions()
        output = FOLDER / "results" / "gpu_tests.json"
        output.write_text(json.dumps({**made, "seconds": round(seconds, 1), "rows": results.rows}, indent=2) + "\n")
        print(f"written to {output}")
    if seconds > ALL_SECONDS:
        print(f"gpu_tests: {seconds:.0f} s are more than {ALL_SECONDS}", file=sys.stderr)
    return code or int(seconds > ALL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
