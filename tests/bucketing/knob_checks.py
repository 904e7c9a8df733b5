"""What the knobs of an AllreduceCallback must compute on every backend; run inside rank processes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from naive_reference import (
    BFLOAT16,
    SPECS,
    Host,
    Values,
    by_rank,
    expect_equal,
    fill,
    on_host,
    put_all,
    reduced,
    sent_and_reduced,
    step,
    times,
    values_for,
)

import gradsync as gs
from contract import IS_EVERYWHERE, expect
from kits import make_kit

# Half of the distance from 1 to the next number: what rounding loses, relative.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}

# -- Compression and scales ---------------------------------------------------------------------------------------

WAYS: tuple[dict[str, Any], ...] = (
    {"compression": "float16"},
    {"compression": "bfloat16", "prescale": 0.5, "postscale": 3.0},
    {"prescale": 0.3, "postscale": 7.0},
    {"postscale": -0.125},
    {"compression": "float16", "prescale": 1 / 3},
)


def scale_and_compress(comm: Any, kit_name: str) -> None:
    kit = make_kit(comm, kit_name)
    n = comm.world_size
    for method in ("mean", "sum"):
        for way in WAYS:
            callback = gs.AllreduceCallback(method, comm, threshold_bytes=700, **way)
            arrays = put_all(kit, values_for(comm.rank, 0))
            for number in range(3):
                values = values_for(comm.rank, number)
                gradients = {name: refilled(kit, arrays[name], each, number) for name, each in values.items()}
                got = step(callback, gradients)
                given = by_rank(n, number)
                if comm.backend != "nccl":
                    expect_equal(comm, got, sent_and_reduced(given, method, way), (method, way, number))
                expect_precision(got, given, method, way, n)


def refilled(kit: Any, array: Any, values: Host, number: int) -> Any:
    """Returns a new array in the first step, and the same in the others."""
    if number == 0:
        return kit.put(values.copy())
    fill(array, values)
    return array


def expect_precision(got: Values, given: Sequence[Values], method: str, way: dict[str, Any], n: int) -> None:
    """All values have one sign: what is lost is a rounding at each end, and on NCCL one for each addition."""
    scale = way.get("prescale", 1.0) * way.get("postscale", 1.0) / (n if method == "mean" else 1)
    for name, result in got.items():
        wide = np.complex128 if result.dtype.kind == "c" else np.float64
        exact = np.sum([values[name].astype(wide) for values in given], axis=0) * scale
        rounding = {np.dtype(np.float16): 2.0**-11, BFLOAT16: 2.0**-8}.get(result.dtype, 2.0**-23)
        if way.get("compression") and result.dtype in (np.float32, np.float64):
            rounding = ROUNDING[way["compression"]]
        error = np.abs(result.astype(wide) - exact)
        assert (error <= (n + 3) * rounding * np.abs(exact)).all(), (name, way, error)


#: Large enough to be scaled where they lie; and some beside those that are not.
# Over MPI "large" is sent in messages of its own.
LARGE = {
    "a": ((90, 100), np.float32),
    "b": ((20_000,), np.float32),
    "large": ((300, 300), np.float32),
    "wide": ((70, 130), np.float64),
}
MIXED = {"a": ((30, 10), np.float32), "b": ((400,), np.float32), "half": ((900,), np.float16), "one": ((), np.float16)}


def scale_in_place(comm: Any, kit_name: str) -> None:
    """Whether a rank's gradients can be written to does not matter, nor whether they live in buckets."""
    kit, way = make_kit(comm, kit_name), {"prescale": 0.3, "postscale": -7.0}
    for specs, views in itertools.product((LARGE, MIXED), (False, True)):
        known = {name: (shape, np.dtype(dtype).name) for name, (shape, dtype) in specs.items()}
        callback = gs.AllreduceCallback("mean", comm, parameters=known, gradient_as_bucket_view=views, **way)
        places = callback.gradient_buffers() if views else put_all(kit, values_for(comm.rank, 0, specs))
        for number in range(4):
            for name, values in values_for(comm.rank, number, specs).items():
                fill(places[name], values)
            is_locked = number == 2 and comm.rank == 0 and not views and isinstance(places["b"], np.ndarray)
            if is_locked:
                places["b"].setflags(write=False)
            got = step(callback, places)
            if is_locked:
                places["b"].setflags(write=True)
            expect_equal(comm, got, sent_and_reduced(by_rank(comm.world_size, number, specs), "mean", way), number)


def scale_only_in_agreement(comm: Any, kit_name: str) -> None:
    """Ranks that differ get PlanMismatch before a gradient is scaled."""
    kit = make_kit(comm, kit_name)
    callback = gs.AllreduceCallback("mean", comm, prescale=0.5)
    gradient = kit.put(np.ones(20_000, np.float32))
    for _ in range(2):
        step(callback, {"a": gradient})
        fill(gradient, np.ones(20_000, np.float32))
        expect(gs.PlanMismatch, lambda: step(callback, {f"of rank {comm.rank}": gradient}))
        assert (on_host(gradient) == 1).all()


# -- When buckets are launched, and how ---------------------------------------------------------------------------


def begin_early(comm: Any, kit_name: str) -> None:
    """A small first bucket is launched while gradients are still to come."""
    kit = make_kit(comm, kit_name)
    gradient_bytes = 4 * 250
    for first_bucket_bytes, launched_after in ((1, 1), (2 * gradient_bytes, 2), (None, 6)):
        for parameters in (None, dict.fromkeys(range(10), ((250,), "float32"))):
            callback = gs.AllreduceCallback(
                "mean",
                comm,
                threshold_bytes=6 * gradient_bytes,
                first_bucket_bytes=first_bucket_bytes,
                parameters=parameters,
            )
            for _ in range(3):
                before, begun = callback.statistics.all_reduces, comm.recorder.begun
                handed_over = []
                launched = []
                for i in range(10):
                    handed_over.append(time.monotonic())
                    callback(i, kit.put(np.ones(250, np.float32)))
                    launched.append(callback.statistics.all_reduces - before)
                callback.flush()
                assert launched.index(1) + 1 == launched_after, (first_bucket_bytes, launched)
                entries = [entry for entry in comm.recorder.entries() if entry.number > begun]
                first = next(entry for entry in entries if "all_reduce" in entry.what.headline())
                assert handed_over[launched_after - 1] <= first.began <= handed_over[launched_after]


# -- NaN, infinity, norms -----------------------------------------------------------------------------------------

WATCHED = {name: SPECS[name] for name in ("one", "double", "empty", "half", "brain", "complex", "huge", "last")}


def watch_for_nan(comm: Any, kit_name: str) -> list[str]:
    """One element on some ranks is not finite, or the sum alone is not: all ranks hear of it in the same step."""
    kit = make_kit(comm, kit_name)
    n = comm.world_size
    told = []
    every = itertools.product((1, 10**7), ("raise", "skip"))
    for threshold_bytes, policy in every if IS_EVERYWHERE else ((1, "raise"), (10**7, "skip")):
        callback = gs.AllreduceCallback("sum", comm, threshold_bytes=threshold_bytes, nonfinite=policy)
        skipped = 0
        for number, (name, bad, ranks) in enumerate(spoilt_steps(n)):
            given = by_rank(n, number, WATCHED)
            for rank in ranks:
                given[rank][name].reshape(-1)[-1] = bad
            is_finite = all(np.isfinite(each.astype(complex)).all() for each in reduced(given, "sum").values())
            gradients = put_all(kit, given[comm.rank])
            if is_finite or policy == "skip":
                got = step(callback, gradients)
                assert callback.skip_step is not is_finite
                skipped += not is_finite
                if is_finite:
                    expect_equal(comm, got, reduced(given, "sum"), number)
                continue
            error = expect(gs.NonFiniteGradient, lambda c=callback, g=gradients: step(c, g))
            own = {} if np.isfinite(complex(bad)) else dict.fromkeys(ranks, name)
            assert error.parameters == own
            assert ("overflowed" in str(error)) == (not own)
            told.append(str(error).partition(":")[2])
            assert not callback.skip_step
        assert callback.statistics.skipped_steps == skipped
    assert comm.all_reduce(np.ones(2) if comm.backend != "nccl" else kit.put(np.ones(2))) is not None
    return told


def spoilt_steps(n: int) -> list[tuple[str, Any, list[int]]]:
    """Returns which gradient of which ranks gets which element; a gradient that overflows does so in the sum alone."""
    fine = ("one", 1.0, [0])
    last = [n - 1]
    return [
        fine,
        ("one", np.nan, last),
        fine,
        fine,
        ("last", np.inf, [0]),
        ("half", -np.inf, last),
        ("brain", np.nan, list(range(n))),
        ("complex", complex(0, np.nan), last),
        ("complex", complex(np.inf, 1), [0]),
        fine,
        ("half", 60000.0, list(range(n))),
        ("huge", 3e38, list(range(n))),
        ("double", 1.7e308, list(range(n))),
        ("double", np.nan, [0]),
        fine,
    ]


def clip(comm: Any, kit_name: str) -> list[str]:
    """The norm is that of all reduced gradients, and they are scaled down to the limit; returns the norms."""
    kit = make_kit(comm, kit_name)
    n = comm.world_size
    norms = []
    limits = (("mean", 10.0), ("sum", 1e9), ("sum", float("inf")), ("mean", 0.001))
    few = zip((1, 700, 10**7, 10**7), limits, strict=True)
    for threshold_bytes, (method, limit) in itertools.product((1, 700, 10**7), limits) if IS_EVERYWHERE else few:
        callback = gs.AllreduceCallback(method, comm, threshold_bytes=threshold_bytes, clip_norm=limit)
        assert callback.norm is None
        arrays = put_all(kit, values_for(comm.rank, 0))
        for number in range(3):
            given = by_rank(n, number)
            for name, array in arrays.items():
                arrays[name] = refilled(kit, array, given[comm.rank][name], number % 2)
            got = step(callback, arrays)
            wanted = reduced(given, method)
            squares = [np.sum(np.abs(each.astype(complex)) ** 2) for each in wanted.values()]
            norm = float(np.sqrt(np.sum(squares)))
            assert type(callback.norm) is float
            np.testing.assert_allclose(callback.norm, norm, rtol=1e-3 if comm.backend == "nccl" else 2e-6)
            norms.append(callback.norm.hex())
            factor = limit / (callback.norm + 1e-6)
            if factor < 1.0:
                wanted = {name: times(each, factor, each.dtype) for name, each in wanted.items()}
            expect_equal(comm, got, wanted, (threshold_bytes, limit, number))
            assert all(on_host(array).tobytes() == got[name].tobytes() for name, array in arrays.items())
    return norms


def clip_what_cannot_be_clipped(comm: Any, kit_name: str) -> None:
    """NaN and infinity: with "skip" nothing is scaled; a norm of nothing, and of zeros, is 0."""
    kit = make_kit(comm, kit_name)
    callback = gs.AllreduceCallback("sum", comm, clip_norm=1.0, nonfinite="skip")
    for bad in (np.nan, np.inf):
        gradients = put_all(kit, {"a": np.full(9, 3.0), "b": np.full(5, bad if comm.rank == 0 else 1.0)})
        got = step(callback, gradients)
        assert callback.skip_step
        assert not np.isfinite(callback.norm)
        assert (got["a"] == 3.0 * comm.world_size).all()
    callback.flush()  # an empty step has nothing that is not finite
    assert not callback.skip_step
    step(callback, put_all(kit, {"a": np.zeros(9)}))
    assert not callback.skip_step
    assert callback.norm == 0.0
    step(callback, put_all(kit, {"e": np.zeros(0)}))
    assert callback.norm == 0.0


def watch(comm: Any, kit_name: str) -> list[str]:
    clip_what_cannot_be_clipped(comm, kit_name)
    return [*watch_for_nan(comm, kit_name), *clip(comm, kit_name)]
