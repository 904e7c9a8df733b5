"""Runs the tests that need a GPU, in four minutes, and writes how each ended.

    python tests/on_gpu.py OUT            # OUT/gpu_tests.xml (JUnit) and OUT/gpu_tests.json
    python tests/on_gpu.py OUT -k nccl    # pytest's options

A world of one comes before two ranks, and two before more, because ranks that share a GPU take turns on it. Tests that
four minutes do not reach are skipped and counted. The exit code is pytest's, or 1 where tests were not reached. No
xdist is needed, and no warning of what else is installed there fails a test.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
# Chosen to fit: every collective and dtype, callbacks, streams; failures last, since they wait.
FILES = ["real_cupy", "backends"]
MOVING, FEW_DTYPES = ("test_movements", "test_layouts"), ("bfloat16", "complex64", "int16", "bool")
TEST_SECONDS = 60  # the first test of two ranks begins with NCCL's first contact
ALL_SECONDS = 240


class Results:
    """A plugin of pytest that orders the tests, ends each in time, and records how it ended."""

    def __init__(self) -> None:
        self.tests: list[dict[str, Any]] = []
        self.not_reached = 0
        self.began = time.monotonic()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(filter(_is_chosen, items), key=_ranks_of)  # stable: ranks of one kind stay together
        for item in items:
            item.add_marker(pytest.mark.timeout(TEST_SECONDS), append=False)  # before the marks that it has

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() - self.began > ALL_SECONDS and item.get_closest_marker("skip") is None:
            self.not_reached += 1
            pytest.skip(f"not reached within {ALL_SECONDS} s")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.tests.append(
                {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
                | ({"reason": report.longrepr[2]} if isinstance(report.longrepr, tuple) else {})
            )


def _is_chosen(item: pytest.Item) -> bool:
    """Leaves out dtypes where bytes only move."""
    dtype = item.callspec.params.get("dtype") if hasattr(item, "callspec") else None
    return dtype is None or not item.name.startswith(MOVING) or str(dtype) in FEW_DTYPES


def _ranks_of(item: pytest.Item) -> tuple[int, int]:
    callspec = getattr(item, "callspec", None)
    _, size = (callspec.params.get("comm") or callspec.params.get("rank") or ("", 0)) if callspec else ("", 0)
    return size, next(i for i, name in enumerate(FILES) if name in item.path.relative_to(TESTS).parts)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "system": platform.platform()}
    for package in (
        "numpy",
        "ml_dtypes",
        "cupy-cuda12x",
        "cupy-cuda13x",
        "nvidia-nccl-cu12",
        "nvidia-nccl-cu13",
        "torch",
    ):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    try:
        import cupy
        from cupy.cuda import nccl

        found |= {"cupy": cupy.__version__, "nccl": str(nccl.get_version())}
        found["gpu"] = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    except Exception as error:
        found["error"] = str(error)
    return found


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    results = Results()
    options = ["-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "-rs", f"--junitxml={folder / 'gpu_tests.xml'}"]
    files = [str(TESTS / name) for name in FILES if (TESTS / name).exists()]
    code = int(pytest.main([f"--rootdir={TESTS.parent}", *options, *sys.argv[2:], *files], plugins=[results]))
    outcomes = [test["outcome"] for test in results.tests]
    summary = {
        "seconds": round(time.monotonic() - results.began, 1),
        **{outcome: outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")},
        "not reached": results.not_reached,
    }
    written = {"summary": summary, "versions": _versions(), "tests": results.tests}
    (folder / "gpu_tests.json").write_text(json.dumps(written, indent=1) + "\n")
    print(f"{summary} in {folder / 'gpu_tests.json'}")
    return code or int(results.not_reached > 0)


if __name__ == "__main__":
    sys.exit(main())
