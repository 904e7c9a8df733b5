"""Steps of a callback, any options together, against the naive reference: values, norm, verdicts, the same bits on
all ranks, and where results lie."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gradsync as gs
from arrays import TOLERANCE, arrays_of, assert_close
from bucketing import reference
from bucketing.reference import SPECS, THRESHOLDS, norm_of, reduced

LAYOUTS = ("C", "F", "strided", "reversed", "read-only", "overlapping")


class Step(NamedTuple):
    """One step: how gradients lie in memory, what each rank leaves out, and where NaN is.

    Attributes:
        layouts: by gradient; others are contiguous.
        are_kept: whether the arrays of the last step come again.
        absent: by rank.
        bad: the ranks that have NaN or infinity, and in which gradient.
        seeds: by rank, of the order in which it hands over.
        are_swapped: whether two kept arrays come for each other's parameter.
        weights: by rank; None: a step without weights.
        is_silent: whether ranks whose weight is 0 hand over nothing; else they hand over NaN.
    """

    layouts: dict[str, str]
    are_kept: bool
    absent: list[set[str]]
    bad: dict[int, str]
    seeds: list[int]
    are_swapped: bool
    weights: list[float] | None
    is_silent: bool


class Program(NamedTuple):
    """Steps of one callback."""

    method: str
    options: dict[str, Any]
    has_hook: bool
    steps: list[Step]


@st.composite
def programs(draw: st.DrawFn, ranks: int) -> Program:
    names = sorted(SPECS)
    options: dict[str, Any] = {"threshold_bytes": draw(st.sampled_from(THRESHOLDS))}
    is_known = draw(st.booleans())
    if is_known:
        options["parameters"] = draw(st.sampled_from(["shapes", "arrays"]))
        options["gradient_as_bucket_view"] = draw(st.booleans())
        options["missing"] = draw(st.sampled_from(["error", "zero"]))
    options["nonfinite"] = draw(st.sampled_from(["off", "raise", "skip"]))
    options["clip_norm"] = draw(st.sampled_from([None, 5.0, 1e9, math.inf]))
    method = draw(st.sampled_from(["sum", "MEAN"]))
    can_miss = options.get("missing") == "zero"
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, 4))):
        if can_miss:
            absent = [draw(st.sets(st.sampled_from(names))) for _ in range(ranks)]
        else:  # without parameters= each step may have other gradients
            absent = [set() if is_known else draw(st.sets(st.sampled_from(names), max_size=3))] * ranks
        weights = None
        if method == "MEAN" and draw(st.booleans()):
            weights = [draw(st.sampled_from([0, 1, 2.5, 7])) for _ in range(ranks)]
            weights = weights if any(weights) else None
        # Who hands over nothing must know the gradients: from the last step, which is not one that failed.
        is_silent = draw(st.booleans()) and (is_known or (bool(steps) and steps[-1].absent == absent))
        bad = {}
        if options["nonfinite"] != "off" and draw(st.integers(0, 2)) == 0:
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                there = [name for name in names if name not in absent[rank] and name != "empty"]
                if there and (weights is None or weights[rank]):
                    bad[rank] = draw(st.sampled_from(there))
        layouts = draw(st.dictionaries(st.sampled_from(["matrix", "one", "double", "huge"]), st.sampled_from(LAYOUTS)))
        seeds = [draw(st.integers(0, 2)) for _ in range(ranks)]
        steps.append(Step(layouts, draw(st.booleans()), absent, bad, seeds, draw(st.booleans()), weights, is_silent))
    return Program(method, options, draw(st.booleans()), steps)


def in_layout(arrays: Any, values: np.ndarray[Any, Any], layout: str) -> Any:
    """An array of these values; an overlapping one has the first value everywhere."""
    if layout == "F":
        return arrays.put(np.asfortranarray(values))
    if layout == "strided":
        around = arrays.put(np.zeros((*values.shape[:-1], 2 * values.shape[-1]), values.dtype))[..., ::2]
        around[...] = arrays.put(values)
        return around
    if layout == "reversed":
        return arrays.put(values[::-1].copy())[::-1]
    if layout == "overlapping":
        return arrays.xp.broadcast_to(arrays.put(values.reshape(-1)[:1].copy()), values.shape)
    array = arrays.put(values)
    if layout == "read-only" and isinstance(array, np.ndarray):
        array.setflags(write=False)
    return array


def run_program(comm: gs.Communicator, program: Program) -> list[bytes]:
    """Checks each step on this rank; returns the bits of all results."""
    arrays, ranks, options = arrays_of(comm), comm.world_size, dict(program.options)
    method, limit, bits = program.method.lower(), options["clip_norm"], []
    if "parameters" in options:
        as_arrays = {name: arrays.put(np.zeros_like(each)) for name, each in reference.given(0, 0).items()}
        options["parameters"] = as_arrays if options["parameters"] == "arrays" else SPECS
    sync = gs.AllreduceCallback(program.method, comm, **options)
    if program.has_hook:
        sync.register_hook(lambda bucket: bucket.communicator.all_reduce(bucket.buffer, bucket.op))
    is_view = options.get("gradient_as_bucket_view", False)
    buffers = dict(sync.gradient_buffers()) if is_view else {}
    kept: dict[str, Any] = {}
    for number, each in enumerate(program.steps):
        of_ranks = reference.by_rank(ranks, number)
        for values, absent in zip(of_ranks, each.absent, strict=True):
            for name, layout in each.layouts.items():
                if layout == "overlapping" and not each.are_kept and not (is_view and name == "one"):
                    values[name][...] = values[name].reshape(-1)[0]
            for name in absent:
                values[name][...] = 0
        for rank, name in each.bad.items():
            of_ranks[rank][name].reshape(-1)[:1] = np.nan if rank else np.inf
        absent = each.absent[comm.rank]
        mine = {name: values.copy() for name, values in of_ranks[comm.rank].items() if name not in absent}
        weight = None if each.weights is None else each.weights[comm.rank]
        if weight == 0:
            mine = {} if each.is_silent else mine
            for values in mine.values():
                values[...] = np.nan
        order = np.random.default_rng(each.seeds[comm.rank]).permutation(list(SPECS))
        mine = {str(name): mine[name] for name in order if name in mine}
        if each.are_swapped and {"one", "two"} <= kept.keys():
            kept["one"], kept["two"] = kept["two"], kept["one"]
        gradients, in_place = {}, set()
        for name, values in mine.items():
            layout = each.layouts.get(name, "C")
            if each.are_kept or (is_view and name == "one"):
                gradients[name] = buffers[name] if is_view else kept.setdefault(name, arrays.put(values))
                gradients[name][...] = arrays.put(values)
                in_place.add(name)
            else:
                gradients[name] = in_layout(arrays, values, layout)
                if not is_view and layout != "overlapping" and (layout != "read-only" or comm.device != "cpu"):
                    in_place.add(name)
        if each.bad and options["nonfinite"] == "raise":
            with pytest.raises(gs.NonFiniteGradient) as raised:
                step(sync, weight, gradients)
            assert sorted(raised.value.parameters) == sorted(set(each.bad.values()))
            assert raised.value.parameter == raised.value.parameters[0]
            assert (sync.norm, sync.total_weight, sync.results()) == (None, None, {})
            kept.clear()
            continue
        results = step(sync, weight, gradients)
        assert sync.total_weight == (None if weight is None else sum(each.weights))
        assert sync.skip_step == bool(each.bad)
        if each.bad:
            kept.clear()
            continue
        assert {name for name in mine if results[name] is gradients[name]} == in_place
        found = sync.results()
        assert all(found[name] is result for name, result in results.items())
        everything = set(SPECS) if "parameters" in options else set(SPECS) - absent
        assert set(found) == everything
        results = found
        on_host = {name: arrays.get(results[name]) for name in sorted(results)}
        wanted = {name: array for name, array in reduced(of_ranks, method, each.weights).items() if name in results}
        check(comm, on_host, wanted, limit, sync.norm)
        bits += [array.tobytes() for array in on_host.values()]
    assert sync.statistics.skipped_steps == sum(
        bool(each.bad) for each in program.steps if options["nonfinite"] == "skip"
    )
    return bits


def step(sync: Any, weight: float | None, gradients: Any) -> dict[str, Any]:
    with sync.backward(weight=weight):
        futures = {name: sync(name, gradient) for name, gradient in gradients.items()}
    return {name: future.result() for name, future in futures.items()}


def check(comm: Any, got: Any, wanted: Any, limit: float | None, norm: float | None) -> None:
    ranks = comm.world_size
    if limit is None:
        assert norm is None
    else:
        assert norm == pytest.approx(norm_of(wanted.values()), rel=1e-3)
        factor = min(1.0, limit / (norm + 1e-6))
        wanted = {name: each * factor for name, each in wanted.items()}
    for name, each in got.items():
        dtype = SPECS[name][1]
        if limit is None or limit > 1e6:
            assert_close(each, wanted[name], dtype, ranks)
        else:  # the factor is as exact as the norm, and one more rounding
            np.testing.assert_allclose(reference.wide(each), wanted[name], rtol=max(2e-5, 3 * ranks * TOLERANCE[dtype]))


PLACES = [
    pytest.param("shm", 1, 10),
    pytest.param("shm", 2, 40),
    pytest.param("shm", 3, 25),
    pytest.param("fake", 2, 12),
    pytest.param("mpi", 2, 30, marks=pytest.mark.mpi),
]


@pytest.mark.parametrize(("place", "ranks", "examples"), PLACES)
def test_any_options_give_what_the_reference_gives(run_on_ranks, place, ranks, examples):
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(programs(ranks))
    def run(program: Program) -> None:
        bits = run_on_ranks(ranks, run_program, program, on=place)
        assert all(of_rank == bits[0] for of_rank in bits)

    run()
