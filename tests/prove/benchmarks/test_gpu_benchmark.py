"""The GPU benchmark refuses where there is no GPU, runs to its end on the stand-in, and holds rows against targets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rank_processes import STAND_IN

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from measurement import Seconds
from on_gpu.rows import Row
from on_gpu.scale import FULL
from on_gpu.targets import judge


def run_benchmark(
    *arguments: str, path: tuple[Path, ...] = (), variables: dict[str, str] | None = None, timeout: float = 100
) -> subprocess.CompletedProcess[str]:
    """Runs the script; the folders of `path` come before all others, in its ranks too."""
    folders = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), **(variables or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def without(module: str, folder: Path) -> Path:
    """Returns the folder, with a module in it that cannot be imported."""
    (folder / f"{module}.py").write_text("raise ImportError('taken away for this test')")
    return folder


def test_without_cupy_it_refuses(tmp_path) -> None:
    run = run_benchmark("--tiny", path=(without("cupy", tmp_path),))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("gpu: nothing to measure without a GPU: CuPy cannot be imported (taken away for this")


def test_without_a_device_it_refuses() -> None:
    run = run_benchmark("--tiny", path=(STAND_IN,), variables={"CUDA_VISIBLE_DEVICES": ""})
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("gpu: nothing to measure without a GPU: there is no NVIDIA driver or GPU here")


def contenders(rows: list[dict], part: str) -> set[str]:
    """Returns who was measured, in some way, in a part; all of whose timings are numbers above zero."""
    measured = [row for row in rows if row["part"] == part and row["status"] == "measured"]
    assert all(row["seconds"]["median"] > 0 and row["host_seconds"]["median"] > 0 for row in measured)
    return {row["contender"] for row in measured}


def test_every_part_runs_on_the_stand_in(tmp_path) -> None:
    output = tmp_path / "gpu.json"
    run = run_benchmark("--tiny", "--output", str(output), path=(STAND_IN, without("torch", tmp_path)))
    assert (run.returncode, run.stderr) == (0, "")
    made = json.loads(output.read_text())
    assert made["machine"]["gpu"]["name"] == "Stand-in"
    assert made["versions"]["in_steps"]["nccl"] == made["versions"]["nccl"] == "2.32.3"
    rows = made["rows"]
    assert contenders(rows, "copy") == {"cudaMemcpyAsync", "elementwise kernel"}
    assert contenders(rows, "packing") >= {"pack", "split", "pack, new addresses", "cupy.concatenate"}
    assert {row["workload"] for row in rows if row["part"] == "packing"} == {
        "tiny, one bucket",
        "tiny, buckets of 4 KiB",
    }
    assert contenders(rows, "step") == {"gradsync"}
    assert contenders(rows, "shared") == {"gradsync, 2 ranks on one GPU: right, not fast"}
    absent = {row["contender"]: row["status"] for row in rows if row["status"] != "measured"}
    assert absent == dict.fromkeys(["DDP's reducer", "DDP's reducer, bucket views"], "not installed")
    assert "Steps of one rank" in run.stdout


def test_packing_alone_brings_the_copies_that_it_is_held_against() -> None:
    run = run_benchmark("--tiny", "--only", "packing", path=(STAND_IN,))
    assert (run.returncode, run.stderr) == (0, "")
    assert "cudaMemcpyAsync" in run.stdout
    assert "Steps" not in run.stdout
    assert "written" not in run.stdout


# The targets.


def row(part: str, workload: str, contender: str, seconds: float, moved_bytes: int | None = None) -> Row:
    return Row(part, workload, contender, seconds=Seconds.of([seconds] * 2), moved_bytes=moved_bytes)


COPIES = [row("copy", "256 MiB", "cudaMemcpyAsync", 1.0, 90), row("copy", "1 GiB", "elementwise kernel", 1.0, 100)]


@pytest.mark.parametrize(
    ("moved_bytes", "must_kept", "reach_kept"), [(79, False, False), (80, True, False), (90, True, True)]
)
def test_packing_is_held_against_the_fastest_copy(moved_bytes, must_kept, reach_kept) -> None:
    packing = row("packing", "ResNet-50, one bucket", "pack", 1.0, moved_bytes)
    (target,) = judge([*COPIES, packing])
    assert target.measured == moved_bytes / 100
    assert (target.must_kept, target.reach_kept) == (must_kept, reach_kept)


def test_a_step_is_held_against_ddp() -> None:
    ours = row("step", "GPT-2 small", "gradsync", 2.0)
    ddp = row("step", "GPT-2 small", "DDP's reducer", 2.0)
    views = row("step", "GPT-2 small", "DDP's reducer, bucket views", 1.0)
    default, with_views = judge([ours, ddp, views])
    assert (default.measured, default.must_kept, default.reach_kept) == (1.0, True, None)
    assert (with_views.measured, with_views.must_kept, with_views.reach_kept) == (2.0, None, False)


def test_what_was_not_measured_breaks_no_promise() -> None:
    absent = Row("step", "ResNet-50", "DDP's reducer", "not installed")
    targets = judge([row("step", "ResNet-50", "gradsync", 2.0), absent])
    assert [(target.measured, target.must_kept, target.reach_kept) for target in targets] == [(None, None, None)] * 2
    assert judge(COPIES) == []


# On a GPU.


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_a_quick_run(tmp_path) -> None:
    output = tmp_path / "gpu.json"
    run = run_benchmark("--quick", "--output", str(output), timeout=380)
    assert run.returncode in (0, 1), run.stderr
    made = json.loads(output.read_text())
    broken = [target["what"] for target in made["targets"] if target["must_kept"] is False]
    assert run.returncode == bool(broken)
    assert {row["workload"] for row in made["rows"] if row["part"] == "step"} == set(FULL.models)
    for part in ("copy", "packing", "step", "shared"):
        assert contenders(made["rows"], part)
    # More than what any GPU's memory does would mean that the clock is wrong.
    assert all(1e10 < (row["bytes_per_second"] or 1e11) < 2e13 for row in made["rows"])
