"""The ranks' side of a sweep, where it is not the command's: on a GPU (here the stand-in's), and over all dtypes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradsync as gs
from gradsync.bench.threshold_sweep import Sweep, run_sweep
from gradsync.bench.thresholds import plan_sweep
from gradsync.bucketing.plan import GradientSpec
from gradsync.bucketing.shapes_file import itemsize_of

ON_GPUS = """
from gradsync.bench.threshold_sweep import Sweep, run_sweep
from gradsync.bench.thresholds import plan_sweep
from gradsync.bucketing.plan import GradientSpec
from gradsync.launching.launcher import launcher

if __name__ == "__main__":
    specs = [GradientSpec(f"#{i}", (100,), "float32", 4) for i in range(5)]
    sweep = Sweep(specs, plan_sweep(specs, [400, 1000]), 2, 5.0)
    for measured in launcher(run_sweep, n_gpus=2, backend="nccl")(sweep):
        steps = [len(samples) for samples in measured.timings.steps]
        print(measured.backend, measured.device, measured.rounds, steps, measured.timings.packs)
"""


def test_a_sweep_over_two_gpus_has_no_packing_alone(tmp_path):
    (tmp_path / "sweep.py").write_text(ON_GPUS)
    stand_in = str(Path(__file__).parents[2] / "stand_in")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "sweep.py")],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(Path(gs.__file__).parents[1]), stand_in]),
            "GRADSYNC_STAND_IN_DEVICES": "2",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "nccl cuda:0 2 [2, 2] []\nnccl cuda:1 2 [2, 2] []\n"


@pytest.mark.parametrize("dtypes", [("float16", "bfloat16", "complex64"), ("int8", "uint64", "float32")])
def test_every_dtype_can_be_measured(dtypes):
    if "bfloat16" in dtypes:
        pytest.importorskip("ml_dtypes")
    specs = [GradientSpec(dtype, (3, 4), dtype, itemsize_of(dtype)) for dtype in dtypes]
    with gs.init_process_group("local"):
        measured = run_sweep(Sweep(specs, plan_sweep(specs, [1000, 2000]), 1, 0.0))
    assert (measured.backend, measured.device, measured.rounds) == ("local", "cpu", 1)
    # Each dtype fills one bucket, so both thresholds make the same ones.
    assert [len(samples) for samples in (*measured.timings.steps, *measured.timings.packs)] == [1, 1]
