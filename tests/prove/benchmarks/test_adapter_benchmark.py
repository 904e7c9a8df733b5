"""The benchmark of the adapters runs, and tells what it timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.timeout(200)
def test_every_wrapper_is_timed(torch_python: str) -> None:
    command = [sys.executable, str(BENCHMARKS / "adapters.py"), "--quick", "--python", torch_python]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert all(line.startswith("small ") and 0 < float(line.split()[-2]) < 10_000 for line in lines)


def test_committed_figures_are_whole() -> None:
    results = json.loads((BENCHMARKS / "results" / "adapters.json").read_text())
    assert {"command", "date", "machine", "versions", "results"} <= results.keys()
    assert {"python", "numpy", "torch"} <= results["versions"].keys()
    assert {row["model"] for row in results["results"]} == {"ResNet-50"}
    assert len(results["results"]) == 5
    assert all(row["seconds"]["samples"] >= 20 for row in results["results"])
