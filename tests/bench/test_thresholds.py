"""`gradsync bench thresholds`: the plan of a sweep, the ranks' program, and the sentence that comes of it."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradsync as gs
from gradsync.bench import thresholds
from gradsync.bench.models import gradients_of, itemsize_of
from gradsync.bench.report import Seconds, plot
from gradsync.bench.thresholds import (
    DEFAULT_MEGABYTES,
    MEGABYTE,
    Candidate,
    Row,
    Sweep,
    panel,
    parse_megabytes,
    plan_sweep,
    recommendation,
    recommended,
    rising_counts,
    rows_of,
    run_sweep,
    same_buckets,
)
from gradsync.bucketing.plan import GradientSpec, plan_buckets
from places import SHM


def specs(*sizes):
    return [GradientSpec(f"#{i}", (size,), "float32", 4) for i, size in enumerate(sizes)]


def row(threshold, milliseconds, all_reduces=1, noise=0.0, steps=9):
    low, high = 1e-3 * (milliseconds - noise / 2), 1e-3 * (milliseconds + noise / 2)
    return Row(Candidate(threshold, all_reduces), Seconds(1e-3 * milliseconds, low, high, steps))


def test_thresholds_are_read_in_megabytes_ascending_and_once():
    assert parse_megabytes("10, 0.25,10,1,") == [MEGABYTE // 4, MEGABYTE, 10 * MEGABYTE]


def test_the_default_goes_from_a_quarter_to_a_hundred():
    defaults = parse_megabytes(DEFAULT_MEGABYTES)
    assert (defaults[0], defaults[-1]) == (MEGABYTE // 4, 100 * MEGABYTE)
    assert 10 * MEGABYTE in defaults


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1,ten", "got 'ten'"),
        ("inf", "got 'inf'"),
        ("nan", "got 'nan'"),
        ("-1", "at least one byte, got -1 MB"),
        ("0", "at least one byte"),
        (" , ", "at least one number"),
    ],
)
def test_wrong_thresholds_are_told(text, told):
    with pytest.raises(gs.InvalidArgument, match=told):
        parse_megabytes(text)


def test_of_thresholds_with_the_same_buckets_the_smallest_is_measured():
    # Two gradients of 400 bytes: together from 800 bytes on.
    assert plan_sweep(specs(100, 100), [100, 400, 800, 4000]) == [
        Candidate(100, 2, (400,)),
        Candidate(800, 1, (4000,)),
    ]


@given(st.lists(st.integers(0, 50), min_size=1), st.lists(st.integers(1, 1000), min_size=1, unique=True).map(sorted))
def test_every_threshold_is_measured_or_stands_beside_one_with_as_many_buckets(sizes, thresholds):
    candidates = plan_sweep(specs(*sizes), thresholds)
    assert sorted(t for c in candidates for t in (c.threshold_bytes, *c.same_buckets)) == thresholds
    for candidate in candidates:
        for threshold in (candidate.threshold_bytes, *candidate.same_buckets):
            assert len(plan_buckets(specs(*sizes), threshold)) == candidate.all_reduces


def test_rows_have_medians_and_quartiles():
    sweep = Sweep(specs(250), [Candidate(1, 7), Candidate(2, 3)], 3, 1.0)
    steps = [[1.0, 3.0, 2.0], [4.0, 4.0, 4.0]]
    first, _ = rows_of(sweep, steps)
    assert first.seconds.median == 2.0
    assert first.as_dictionary()["seconds"]["lower_quartile"] == 1.5


# What a person reads: one sentence, and how sure it is.

DEFAULT = 10 * MEGABYTE


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        # The figures of the complaint: 25, 50 and 100 MB do alike, and nobody needs to choose among them.
        (
            [row(MEGABYTE, 37.9), row(25 * MEGABYTE, 31.8), row(50 * MEGABYTE, 31.7), row(100 * MEGABYTE, 32.1)],
            "Thresholds from 25 MB to 100 MB are equally fast, 31.7 ms to 32.1 ms a step. "
            "Differences below 0.951 ms (3%) do not count.\nUse gs.AllreduceCallback(threshold_bytes=25 * 1024**2).",
        ),
        (
            [row(MEGABYTE, 20.0), row(DEFAULT, 10.0), row(25 * MEGABYTE, 10.1), row(100 * MEGABYTE, 12.0)],
            "Thresholds from 10 MB to 25 MB are equally fast, 10 ms to 10.1 ms a step. "
            "Differences below 0.3 ms (3%) do not count.\nSo the default (10 MB) is right.",
        ),
        (
            [row(MEGABYTE // 4, 20.0), row(1234, 10.0), row(25 * MEGABYTE, 12.0)],
            "1.21 KB is fastest, 10 ms a step. "
            "Differences below 0.3 ms (3%) do not count.\nUse gs.AllreduceCallback(threshold_bytes=1234).",
        ),
        (
            [row(MEGABYTE // 4, 10.0, noise=5.0), row(MEGABYTE, 14.0), row(DEFAULT, 13.0)],
            "All these thresholds are equally fast, 10 ms to 14 ms a step. "
            "Differences below 5 ms are noise: the quartiles of the fastest threshold are 5 ms apart.\n"
            "So the default (10 MB) is right.",
        ),
        (
            [row(MEGABYTE, 10.0, 54)],
            "All tested thresholds give the same 54 buckets, so there is nothing to choose. A step takes 10 ms.",
        ),
        (
            [row(MEGABYTE, 10.0, 1)],
            "All tested thresholds give the same 1 bucket, so there is nothing to choose. A step takes 10 ms.",
        ),
    ],
)
def test_one_sentence_says_which_thresholds_do_and_how_sure_that_is(rows, told):
    assert recommendation(rows, 9).startswith(told)


def test_few_steps_are_not_sure():
    rows = [row(MEGABYTE, 306, steps=3), row(DEFAULT, 341, steps=3), row(50 * MEGABYTE, 283, noise=36.7, steps=3)]
    told = "50 MB was fastest, 283 ms a step. This result is not reliable, "
    told += "because the command measured too few steps: use "
    assert recommendation(rows, 3) == f"{told}--steps 20."
    assert recommendation(rows, 20) == f"{told}a longer --time-limit."
    assert recommended(rows) is rows[2]


def test_the_default_is_recommended_where_it_does_else_the_smallest_that_does():
    rows = [row(MEGABYTE, 10.2), row(DEFAULT, 10.1), row(25 * MEGABYTE, 10.0)]
    assert recommended(rows) is rows[1]
    assert recommended([rows[0], rows[2]]) is rows[0]
    standing_for_it = replace(rows[2], candidate=Candidate(5 * MEGABYTE, 1, (DEFAULT,)))
    assert recommended([rows[0], standing_for_it]) is standing_for_it


def test_what_was_not_measured_and_rising_counts_are_explained():
    first = replace(row(MEGABYTE // 4, 1.0, 45), candidate=Candidate(MEGABYTE // 4, 45, (MEGABYTE // 2,)))
    assert same_buckets([first]) == "Not measured: 512 KB (same buckets as 256 KB)."
    assert same_buckets([row(1, 1.0)]) == ""
    assert rising_counts([first, row(MEGABYTE, 1.0, 48)]).startswith("A larger threshold can make more all-reduces")
    assert rising_counts([first, row(MEGABYTE, 1.0, 45)]) == ""


def test_counts_do_rise_and_fall():
    """ResNet-50's gradients make more buckets of 1 MB than of 0.5 MB."""
    gradients = gradients_of("resnet50")
    assert len(plan_buckets(gradients, MEGABYTE)) > len(plan_buckets(gradients, MEGABYTE // 2))


def test_a_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    picture = [panel([row(MEGABYTE, 10.0), row(DEFAULT, 9.0)])]
    plot(picture, "resnet50: 2 ranks over shm", "threshold", str(tmp_path / "out.png"))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


# The ranks' program, where it is not the command's: on a GPU (here the stand-in's), and over all dtypes.

ON_GPUS = """
from gradsync.bench.thresholds import Sweep, plan_sweep, run_sweep
from gradsync.bucketing.plan import GradientSpec
from gradsync.launching.launcher import launcher

if __name__ == "__main__":
    specs = [GradientSpec(f"#{i}", (100,), "float32", 4) for i in range(5)]
    sweep = Sweep(specs, plan_sweep(specs, [400, 1000]), 2, 5.0)
    for measured in launcher(run_sweep, n_gpus=2, backend="nccl")(sweep):
        print(measured.backend, measured.device, [len(samples) for samples in measured.steps])
"""


def test_a_sweep_over_two_gpus(tmp_path):
    (tmp_path / "sweep.py").write_text(ON_GPUS)
    path = os.pathsep.join([str(Path(gs.__file__).parents[1]), str(Path(__file__).parents[1] / "fake_cupy")])
    done = subprocess.run(
        [sys.executable, str(tmp_path / "sweep.py")],
        env=os.environ | {"PYTHONPATH": path, "FAKE_CUPY_DEVICES": "2"},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "nccl cuda:0 [2, 2]\nnccl cuda:1 [2, 2]\n"


@pytest.mark.parametrize("dtypes", [("float16", "bfloat16", "complex64"), ("int8", "uint64", "float32")])
def test_every_dtype_can_be_measured(dtypes):
    if "bfloat16" in dtypes:
        pytest.importorskip("ml_dtypes")
    of_dtypes = [GradientSpec(dtype, (3, 4), dtype, itemsize_of(dtype)) for dtype in dtypes]
    with gs.init_process_group("local"):
        measured = run_sweep(Sweep(of_dtypes, plan_sweep(of_dtypes, [1000, 2000]), 1, 0.0))
    assert (measured.backend, measured.device) == ("local", "cpu")
    # Each dtype fills one bucket, so both thresholds make the same ones.
    assert [len(samples) for samples in measured.steps] == [1]


def largest_result(_comm):
    """Measures floating gradients beside an integer one; returns the largest element of any result."""
    largest = 0.0

    class Recording(gs.AllreduceCallback):
        def __call__(self, param, grad):
            nonlocal largest
            future = super().__call__(param, grad)
            largest = max(largest, float(abs(grad).max()))  # the results of the step before
            return future

    thresholds.AllreduceCallback = Recording
    specs = [GradientSpec(dtype, (4,), dtype, itemsize_of(dtype)) for dtype in ("float16", "complex64", "int8")]
    run_sweep(Sweep(specs, plan_sweep(specs, [1]), 20, 5.0))
    thresholds.AllreduceCallback = gs.AllreduceCallback
    return largest


def test_the_values_of_a_sweep_do_not_grow_from_step_to_step():
    assert max(SHM.run(3, largest_result)) <= 2
