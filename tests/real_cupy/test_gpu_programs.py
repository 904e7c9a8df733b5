"""The programs for the first minutes on a GPU, run over host memory, and where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from real_cupy import harness

pytestmark = pytest.mark.cupy
ROOT = Path(__file__).parents[2]
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def run(program: str, folder: Path, *options: str, environment: dict[str, str]) -> tuple[int, Any]:
    """Runs it, and returns its exit code and the JSON that it has written."""
    done = subprocess.run(
        [sys.executable, str(ROOT / program), str(folder), *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    (written,) = folder.glob("*.json")
    print(done.stdout, done.stderr)
    return done.returncode, json.loads(written.read_text())


def one_device() -> dict[str, str]:
    return {**harness.environment(), "HOST_CUDA_DEVICES": "90"}


def test_first_light(tmp_path) -> None:
    """All stages run to their end; where kernels of CuPy make the values, these are wrong over host memory."""
    code, found = run("benchmarks/gpu_first_light.py", tmp_path, environment=one_device())
    assert {name: stage["error"] for name, stage in found["stages"].items()} == dict.fromkeys(found["stages"], "")
    assert [name for name, stage in found["stages"].items() if not stage["ok"]] == ["kernels"]
    assert code == 1
    assert found["stages"]["facts"]["found"]["gpu"] == "Host memory"
    assert found["stages"]["two"]["found"]["environment"]["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert found["stages"]["two"]["found"]["by"] == "RankFailed"


def test_first_light_without_a_gpu(tmp_path) -> None:
    code, found = run("benchmarks/gpu_first_light.py", tmp_path, environment=WITHOUT_GPU)
    assert code == 100
    assert found["no gpu"]
    assert found["stages"] == {}


def test_the_tests_on_a_gpu(tmp_path) -> None:
    """Without xdist; one rank comes before two, which share the only device."""
    options = "-p", "no:xdist", "-k", "real_cupy and (futures or lists)"
    code, found = run("tests/on_gpu.py", tmp_path, *options, environment=one_device())
    assert code == 0
    outcomes = {test["test"]: test["outcome"] for test in found["tests"]}
    assert found["summary"]["passed"] == len(outcomes) >= 6
    sizes = [name.partition("[gpu-")[2][0] for name in outcomes]
    assert sizes == sorted(sizes)
    cases = list(ElementTree.parse(tmp_path / "gpu_tests.xml").iter("testcase"))
    assert len(cases) == len(outcomes)


def test_the_tests_on_a_gpu_without_one(tmp_path) -> None:
    code, found = run("tests/on_gpu.py", tmp_path, environment=WITHOUT_GPU)
    assert code == 0
    assert found["summary"]["passed"] == found["summary"]["failed"] == 0
    assert all("no usable GPU" in test["reason"] or "no GPU" in test["reason"] for test in found["tests"])
