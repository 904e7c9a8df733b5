"""NaN, infinity, the norm and clipping: the same verdict on all ranks, which names the gradients."""

from __future__ import annotations

import gc
import math
import pickle
import weakref

import ml_dtypes
import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_of, dtype_of, in_layout, read_only
from bucketing.reference import norm_of, step

DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64")


@pytest.mark.ranks(on={"shm": (2, 3), "fake": (2,), "mpi": (3,)})
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ranks_hear_which_gradients_are_not_finite(comm, dtype):
    """Wherever it lies, in a gradient that is larger than what is checked at once, and among small ones."""
    arrays, last = arrays_of(comm), comm.rank == comm.world_size - 1
    sync = gs.AllreduceCallback("sum", comm, nonfinite="raise", threshold_bytes=500_000)

    def gradients(**changes):
        made = {name: np.ones(size, dtype_of(dtype)) for name, size in (("a", 3), ("large", 70_001), ("none", 0))}
        made |= {f"small {number}": np.ones(100, dtype_of(dtype)) for number in range(20)}
        for name, (at, value) in changes.items():
            made[name][at] = value
        return {name: arrays.put(each) for name, each in made.items()}

    with np.errstate(all="ignore"):
        for at, bad in ((0, np.nan), (35_000, np.inf), (70_000, -np.inf)):
            for changes, parameters in (
                ({"large": (at, bad)} if last else {}, ("large",)),
                ({"a": (1, bad)} if last else {"large": (at, bad)}, ("a", "large")),
                ({"small 7": (1, bad), "a": (1, bad)}, ("a", "small 7")),
            ):
                with pytest.raises(gs.NonFiniteGradient) as raised:
                    step(sync, gradients(**changes))
                assert raised.value.parameters == parameters
                assert raised.value.parameter == parameters[0]
            step(sync, gradients())
        # Each rank's gradients are finite, the sum is not.
        with pytest.raises(gs.NonFiniteGradient) as raised:
            step(sync, gradients(large=(at, float(ml_dtypes.finfo(dtype_of(dtype)).max))))
        assert raised.value.parameters == ("large",)


@pytest.mark.ranks(2)
def test_a_bucket_of_empty_gradients_is_finite(comm):
    for dtype in DTYPES:
        sync = gs.AllreduceCallback("mean", comm, name=dtype, nonfinite="raise", clip_norm=1.0)
        for _ in range(3):
            step(sync, {"a": np.empty((0, 3), dtype_of(dtype)), "b": np.empty(0, dtype_of(dtype))})
        assert sync.norm == 0.0


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
    assert raised.value.parameter == "w"
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


@pytest.mark.parametrize("limit", [5.1, 9.9, 1e6])
def test_clipping_never_makes_gradients_larger(alone, limit):
    sync = gs.AllreduceCallback("sum", alone, clip_norm=limit)
    assert step(sync, {"w": np.array([3.0, 4.0])})["w"].tolist() == [3.0, 4.0]


@pytest.mark.ranks(2, on=("shm", "fake"))
def test_what_is_not_finite_is_not_scaled(comm):
    """With "skip" the other gradients are as they were, with an infinite limit too; an empty step skips nothing."""
    arrays = arrays_of(comm)
    for limit in (1.0, math.inf):
        sync = gs.AllreduceCallback("sum", comm, name=str(limit), clip_norm=limit, nonfinite="skip")
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


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("scale", [1e200, 1.2e154, 1e-200, 1e-160, 5e-324])
def test_squares_that_leave_the_range_of_float64_are_no_silent_zeros(comm, dtype, scale):
    """Beside others that do not, in the shares of some ranks only, and of any sign."""
    values = np.zeros(9, dtype)
    values[1:3] = scale, -scale
    if dtype == "complex128":
        values[4] = scale * 1j
    wanted = scale * math.sqrt(np.count_nonzero(values))
    sync = gs.AllreduceCallback("mean", comm, clip_norm=1.0, nonfinite="raise")
    results = step(sync, {"a": values.copy(), "b": np.zeros(3, "float32")})
    assert sync.norm == pytest.approx(wanted)
    assert results["a"] == pytest.approx(values / max(1.0, wanted), abs=0.0)


def test_a_norm_beyond_float64_is_clipped_all_the_same(alone):
    sync = gs.AllreduceCallback("mean", alone, clip_norm=1.0, nonfinite="raise")
    result = step(sync, {"a": np.full(4, -1.7e308)})["a"]
    assert sync.norm == math.inf
    assert result == pytest.approx(np.full(4, -0.5))


@pytest.mark.ranks(2)
def test_a_step_that_is_not_finite_fails_as_a_whole_and_the_next_goes_on(comm):
    """Its arrays have the reduced values; each future raises; a rank without a batch still knows the gradients."""
    sync = gs.AllreduceCallback("mean", comm, nonfinite="raise", clip_norm=1.0)
    gradients = {"a": np.full(2, 3.0 + comm.rank), "b": np.array([np.inf if comm.rank else 1.0])}
    with pytest.raises(gs.NonFiniteGradient) as raised, sync.backward():
        futures = [sync(name, gradient) for name, gradient in gradients.items()]
    for future in futures:
        assert future.done()
        assert future.exception() is raised.value
        with pytest.raises(gs.NonFiniteGradient):
            future.result()
    assert gradients["a"].tolist() == [3.5] * 2
    assert (sync.norm, sync.skip_step, sync.results(), sync.statistics.steps) == (None, False, {}, 0)
    with sync.backward(weight=comm.rank):
        if comm.rank:
            sync("a", np.full(2, 0.3))
            sync("b", np.array([0.4]))
    assert sync.norm == pytest.approx(math.sqrt(0.34))
    assert sync.results()["a"].tolist() == [0.3] * 2


@pytest.mark.ranks(2)
def test_a_step_that_is_skipped_has_its_values(comm):
    sync = gs.AllreduceCallback("mean", comm, nonfinite="skip", clip_norm=1.0)
    results = step(sync, {"a": np.full(2, 3.0 + comm.rank), "b": np.array([np.nan if comm.rank else 1.0])})
    assert results["a"].tolist() == [3.5] * 2
    assert sync.results()["a"] is results["a"]
    assert (sync.skip_step, sync.statistics.steps, sync.statistics.skipped_steps) == (True, 1, 1)


@pytest.mark.ranks(2, on=("shm", "fake"))
@pytest.mark.parametrize("layout", ["C", "Fortran", "strided", "reversed"])
def test_what_is_clipped_is_what_the_futures_give(comm, layout):
    """Read-only arrays stay as they are, other layouts are written to."""
    arrays = arrays_of(comm)
    sync = gs.AllreduceCallback("mean", comm, clip_norm=1.0)
    given = in_layout(np.full((2, 8), 3.0 + comm.rank), arrays, layout)
    fixed = read_only(arrays.put(np.full(9, 4.0)))
    results = step(sync, {"a": given, "b": fixed})
    factor = 1.0 / math.sqrt(16 * 3.5**2 + 9 * 16.0)
    assert results["a"] is given
    np.testing.assert_allclose(arrays.get(given), 3.5 * factor, rtol=1e-5)
    np.testing.assert_allclose(arrays.get(results["b"]), 4.0 * factor, rtol=1e-5)
    if isinstance(fixed, np.ndarray):
        assert (fixed == 4.0).all()
        assert results["b"] is not fixed


@pytest.mark.ranks(2)
def test_arrays_that_came_by_pickle_are_clipped_as_all_others(comm):
    """Their dtype equals NumPy's own, and is another object."""
    sync = gs.AllreduceCallback("mean", comm, clip_norm=1.0)
    turned = pickle.loads(pickle.dumps(np.asfortranarray(np.full((2, 2), 3.0))))
    results = step(sync, {"a": np.full(2, 4.0), "b": turned})
    np.testing.assert_allclose(results["b"], 3.0 / math.sqrt(4 * 9.0 + 2 * 16.0), rtol=1e-5)


@pytest.mark.ranks(2)
def test_a_callback_whose_step_failed_can_be_collected(comm):
    """Else its arrays stay, and the next callback of its line is refused."""

    def fail():
        sync = gs.AllreduceCallback("mean", comm, nonfinite="raise")
        with pytest.raises(gs.NonFiniteGradient):
            step(sync, {"a": np.full(2, np.nan)})
        with pytest.raises(gs.PlanMismatch):
            step(sync, {"a": np.ones(2 + comm.rank)})
        return weakref.ref(sync)

    first = fail()
    gc.collect()
    assert first() is None
    fail()
