"""NaN, infinity, the norm and clipping: the same verdict on all ranks, which names gradient and rank."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_of, dtype_of
from bucketing.reference import norm_of, step

REASON = "until bucketing is rebuilt"
DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64")
WAYS = {
    "one bucket": {},
    "many buckets": {"threshold_bytes": 100_000},
    "views": {"gradient_as_bucket_view": True},
    "norm": {"clip_norm": math.inf},
}
#: Larger than what is checked at once, so small that many go together, and none at all.
SIZES = (70_001, *[100] * 20, 0, 3_000, 1, 7)
EMPTY = SIZES.index(0)


def spoilt(rank, number, dtype, ranks):
    """A rank's gradients in a step: right, near the largest of the dtype, or with NaN and infinity on some ranks."""
    of_all, rng = np.random.default_rng(number), np.random.default_rng([number, rank])
    gradients = [rng.uniform(0.5, 1.0, size).astype(dtype_of(dtype)) for size in SIZES]
    places = [at for at in range(len(SIZES)) if at != EMPTY]
    if number % 4 == 1:
        gradients[int(of_all.choice(places))][...] = float(ml_dtypes.finfo(dtype_of(dtype)).max)
    elif number % 4 > 1 and (rank == number % ranks or rng.integers(2)):
        for at in rng.choice(places, size=number % 4):
            gradients[at][rng.integers(SIZES[at])] = rng.choice([np.nan, np.inf, -np.inf])
    return gradients


def look_for_nan(comm, dtype, options):
    """Whether each step failed, and whom the error names; the reference looks at every rank's gradients."""
    arrays, found = arrays_of(comm), []
    if "gradient_as_bucket_view" in options:
        options = options | {"parameters": {f"w{at}": ((size,), dtype) for at, size in enumerate(SIZES)}}
    sync = gs.AllreduceCallback("sum", comm, nonfinite="raise", **options)
    for number in range(8):
        of_ranks = [spoilt(rank, number, dtype, comm.world_size) for rank in range(comm.world_size)]
        bad = {
            rank: [f"w{at}" for at, each in enumerate(gradients) if not np.isfinite(each).all()]
            for rank, gradients in enumerate(of_ranks)
        }
        bad = {rank: names for rank, names in bad.items() if names}
        gradients = {f"w{at}": arrays.put(each) for at, each in enumerate(of_ranks[comm.rank])}
        with np.errstate(all="ignore"):
            try:
                step(sync, gradients)
            except gs.NonFiniteGradient as error:
                parameters = dict(error.parameters)
            else:
                parameters = None
        if number % 4 == 0:
            assert parameters is None
        elif number % 4 == 1:
            assert parameters == {}  # each rank's gradients are finite, the sum is not
        else:
            assert parameters.keys() == bad.keys()
            assert all(name in bad[rank] for rank, name in parameters.items())
        found.append(parameters)
    return found


@pytest.mark.parametrize(
    ("place", "ranks", "dtype", "way"),
    [
        *[("shm", 2, dtype, "one bucket") for dtype in DTYPES[1:]],
        *[("shm", 3, "float32", way) for way in WAYS],
        ("fake", 2, "float16", "one bucket"),
        *[("fake", 2, "float32", way) for way in ("views", "norm")],
        *[pytest.param("mpi", 3, "float32", way, marks=pytest.mark.mpi) for way in WAYS],
    ],
)
def test_all_ranks_hear_which_gradients_are_not_finite(run_on_ranks, place, ranks, dtype, way):
    found = run_on_ranks(ranks, look_for_nan, dtype, WAYS[way], on=place)
    assert found == [found[0]] * ranks


@pytest.mark.ranks(2)
def test_a_bucket_of_empty_gradients_is_finite(comm):
    for dtype in DTYPES:
        sync = gs.AllreduceCallback("mean", comm, nonfinite="raise", clip_norm=1.0)
        for _ in range(3):
            step(sync, {"a": np.empty((0, 3), dtype_of(dtype)), "b": np.empty(0, dtype_of(dtype))})
        assert sync.norm == 0.0


@pytest.mark.xfail(raises=AssertionError, reason=REASON)
def test_the_gradient_that_was_handed_over_first_is_named(alone):
    """NaN begins in a small bucket, and has spread to one that is full first."""
    sync = gs.AllreduceCallback("mean", alone, nonfinite="raise", threshold_bytes=4000)
    with pytest.raises(gs.NonFiniteGradient) as raised, sync.backward():
        sync("layer norm", np.full(4, np.nan, np.float32))
        sync("weights", np.full(4000, np.nan, np.float16))
    assert raised.value.parameter == "layer norm"


def test_nobody_looks_unless_asked(alone):
    sync = gs.AllreduceCallback("mean", alone)
    step(sync, {"w": np.full(3, np.nan)})
    assert (sync.norm, sync.skip_step) == (None, False)


def test_figures_of_the_last_step_go_with_a_failed_one(alone):
    sync = gs.AllreduceCallback("sum", alone, clip_norm=math.inf, nonfinite="raise")
    step(sync, {"w": np.array([3.0, 4.0])})
    assert sync.norm == 5.0
    with pytest.raises(gs.NonFiniteGradient) as raised:
        step(sync, {"w": np.array([np.nan])})
    assert (raised.value.rank, raised.value.parameter) == (0, "w")
    assert (sync.norm, sync.skip_step) == (None, False)


# -- The norm, and clipping --------------------------------------------------------------------------------------------


@pytest.mark.ranks(on={"shm": (2, 3), "fake": (2,), "gpu": (2,), "mpi": (2,)})
@pytest.mark.parametrize(("size", "scale"), [(5, 1.0), (90_000, 1.0), (3_000, 1e-25), (70_000, 1e25)])
def test_the_norm_is_that_of_all_reduced_gradients(comm, size, scale):
    """In float64, whatever the dtype: squares beyond the range of float32 count too."""
    arrays, rng = arrays_of(comm), np.random.default_rng(7)
    dtypes = ["float32", "float64", "complex64"] if scale == 1.0 else ["float32", "float64"]
    given = {f"{dtype} {n}": (scale * rng.normal(size=n)).astype(dtype) for dtype in dtypes for n in (size, 3, 0)}
    sync = gs.AllreduceCallback("sum", comm, clip_norm=math.inf)
    for _ in range(2):
        results = step(sync, {name: arrays.put(each) for name, each in given.items()})
        assert sync.norm == pytest.approx(comm.world_size * norm_of(given.values()), rel=1e-6)
    assert all((arrays.get(results[name]) == comm.world_size * each).all() for name, each in given.items() if scale < 2)


@pytest.mark.ranks(2, on=("shm", "fake"))
def test_what_is_not_finite_is_not_scaled(comm):
    """With "skip" the other gradients are as they were, with an infinite limit too; an empty step skips nothing."""
    arrays = arrays_of(comm)
    for limit in (1.0, math.inf):
        sync = gs.AllreduceCallback("sum", comm, clip_norm=limit, nonfinite="skip")
        for bad in (np.nan, np.inf):
            results = step(sync, {"a": arrays.put(np.full(9, 3.0)), "b": arrays.put(np.array([1.0, bad]))})
            assert sync.skip_step
            assert not math.isfinite(sync.norm)
            assert (arrays.get(results["a"]) == 3.0 * comm.world_size).all()
        sync.flush()
        assert not sync.skip_step
        assert sync.statistics.skipped_steps == 2


def test_integers_have_a_norm_and_are_not_clipped(alone):
    sync = gs.AllreduceCallback("sum", alone, clip_norm=1.0)
    with pytest.raises(gs.UnsupportedDtype):
        sync("i", np.ones(3, np.int32))
    sync = gs.AllreduceCallback("sum", alone, nonfinite="raise", clip_norm=math.inf)
    integers = np.array([3, 4])
    step(sync, {"i": integers})
    assert (sync.norm, integers.tolist()) == (5.0, [3, 4])


@pytest.mark.xfail(raises=AssertionError, reason=REASON)
def test_squares_that_overflow_are_no_silent_zeros(alone):
    sync = gs.AllreduceCallback("mean", alone, clip_norm=1.0)
    result = step(sync, {"a": np.full(2, 1e200)})["a"]
    assert sync.norm == pytest.approx(1e200 * math.sqrt(2))
    assert result == pytest.approx(math.sqrt(0.5))
