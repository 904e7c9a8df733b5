"""What the knobs of an AllreduceCallback must compute on every backend; run inside rank processes."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
from naive_reference import (
    SPECS,
    Host,
    by_rank,
    expect_equal,
    fill,
    on_host,
    put_all,
    reduced,
    step,
    times,
    values_for,
)

import gradsync as gs
from contract import IS_EVERYWHERE, expect
from kits import make_kit


def refilled(kit: Any, array: Any, values: Host, number: int) -> Any:
    """Returns a new array in the first step, and the same in the others."""
    if number == 0:
        return kit.put(values.copy())
    fill(array, values)
    return array


# -- When buckets are launched, and how ---------------------------------------------------------------------------


def begin_early(comm: Any, kit_name: str) -> None:
    """A full bucket is launched while gradients are still to come."""
    kit = make_kit(comm, kit_name)
    gradient_bytes, fit = 4 * 250, 6
    for parameters in (None, dict.fromkeys(range(10), ((250,), "float32"))):
        callback = gs.AllreduceCallback("mean", comm, threshold_bytes=fit * gradient_bytes, parameters=parameters)
        for _ in range(3):
            before, begun = callback.statistics.all_reduces, comm.recorder.begun
            handed_over = []
            launched = []
            for i in range(10):
                handed_over.append(time.monotonic())
                callback(i, kit.put(np.ones(250, np.float32)))
                launched.append(callback.statistics.all_reduces - before)
            callback.flush()
            assert launched.index(1) + 1 == fit, launched
            entries = [entry for entry in comm.recorder.entries() if entry.number > begun]
            first = next(entry for entry in entries if "all_reduce" in entry.what.headline())
            assert handed_over[fit - 1] <= first.began <= handed_over[fit]


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
