"""benchmarks/test_gpu.py without a GPU: every row runs, with tiny arrays, on the fake CuPy and on the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from real_cupy import harness

ROOT = Path(__file__).parents[2]


def fake() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "fake_cupy"), os.environ.get("PYTHONPATH", "")])}


def real() -> dict[str, str]:
    return {**harness.environment(), "HOST_CUDA_DEVICES": "90"}


@pytest.mark.parametrize("cupy", [fake, pytest.param(real, marks=pytest.mark.cupy)])
def test_every_row_of_gradsync_runs(cupy) -> None:
    pytest.importorskip("pytest_benchmark")
    rows = "ResNet and not DDP"  # PyTorch may have a GPU, and has no fake one
    options = ["-m", "gpu", "-k", rows, "--benchmark-disable", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "benchmarks/test_gpu.py", *options],
        cwd=ROOT,
        env={**os.environ, **cupy()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 11 passed" in done.stdout, done.stdout  # nothing was skipped
    assert "skipped" not in done.stdout
