"""The bucket rule: one dtype a bucket, several gradients never above the threshold, a larger one alone."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import combinations, pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gradsync as gs
from arrays import arrays_of

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
dtypes = st.sampled_from(["float32", "float64", "float16"])
specs = st.lists(st.tuples(shapes, dtypes), max_size=30).map(
    lambda rows: {f"p{i:02}": row for i, row in enumerate(rows)}
)
of_one_world = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def size_of(spec):
    return prod(spec[0]) * np.dtype(spec[1]).itemsize


def buckets_of(sync, gradients):
    """The names of the gradients in each bucket of a step, in the order of launch, as a hook sees them."""
    seen = []
    sync.register_hook(lambda bucket: seen.append((bucket.names, bucket.buffer.dtype, bucket.buffer.tolist())))
    with sync.backward():
        for name, gradient in gradients.items():
            sync(name, gradient)
    return seen


@of_one_world
@given(specs, st.integers(1, 2000), st.booleans())
def test_the_bucket_rule_holds_for_any_gradients(alone, specs, threshold_bytes, is_known):
    options = {"parameters": specs} if is_known and specs else {}
    sync = gs.AllreduceCallback("sum", alone, threshold_bytes=threshold_bytes, **options)
    for _ in range(2):  # the plan of a step is that of any other step with the same gradients
        gradients = {name: np.full(shape, float(name[1:]), dtype) for name, (shape, dtype) in specs.items()}
        buckets = buckets_of(sync, gradients)
        assert sorted(name for names, *_ in buckets for name in names) == sorted(specs)
        for names, dtype, values in buckets:
            assert {specs[name][1] for name in names} == {str(dtype)}
            assert len(names) == 1 or sum(size_of(specs[name]) for name in names) <= threshold_bytes
            assert values == [float(name[1:]) for name in names for _ in range(prod(specs[name][0]))]  # end to end
        for one in {dtype for _, dtype in specs.values()}:
            sizes = [sum(size_of(specs[name]) for name in names) for names, dtype, _ in buckets if dtype == one]
            small = [size for size in sizes if size <= threshold_bytes]
            assert all(a + b >= threshold_bytes for a, b in pairwise(small)), "two buckets could have been one"
    assert sync.statistics.gradients == 2 * len(specs)
    assert sync.statistics.all_reduces == 2 * len(buckets)
    assert sync.statistics.bytes_all_reduced == 2 * sum(map(size_of, specs.values()))


@pytest.mark.ranks(2, on=("shm", "fake"))
@pytest.mark.parametrize(("threshold_bytes", "buckets"), [(399, 14), (400, 14), (401, 14), (800, 7), (10**7, 2)])
def test_the_threshold_decides_the_number_of_collectives(comm, threshold_bytes, buckets):
    """10 gradients of 400 bytes of float32 and, in between, 4 of float64."""
    put = arrays_of(comm).put
    sync = gs.AllreduceCallback("sum", comm, threshold_bytes=threshold_bytes)
    for number in range(1, 3):
        seconds = sync.statistics.communication_seconds
        with sync.backward():
            for i in range(10):
                sync(i, put(np.ones(100, np.float32)))
                if i % 3 == 0:
                    sync(f"double {i}", put(np.ones(50)))
        assert (sync.statistics.all_reduces, sync.statistics.steps) == (buckets * number, number)
        assert sync.statistics.bytes_all_reduced == 14 * 400 * number
        assert sync.statistics.communication_seconds > seconds


@pytest.mark.ranks(2, on=("fake", "gpu"))
def test_over_nccl_with_parameters_a_full_bucket_is_launched_while_gradients_are_to_come(comm):
    put, names = arrays_of(comm).put, range(10)
    parameters = dict.fromkeys(names, ((250,), "float32"))
    sync = gs.AllreduceCallback("mean", comm, threshold_bytes=6 * 1000, parameters=parameters)
    for _ in range(2):
        before, launched = sync.statistics.all_reduces, []
        for name in names:
            sync(name, put(np.ones(250, np.float32)))
            launched.append(sync.statistics.all_reduces - before)
        sync.flush()
        assert launched == [0] * 5 + [1] * 4 + [2]
        assert sync.statistics.all_reduces - before == 2


@pytest.mark.parametrize(
    ("threshold", "size_bytes"),
    [
        (None, 10 * 1024**2),
        ("25 MB", 25 * 1024**2),
        ("1.5kb", 1536),
        (" 2 GiB ", 2 * 1024**3),
        ("64 B", 64),
        (np.int64(7), 7),
    ],
)
def test_a_threshold_is_a_number_of_bytes_or_text(threshold, size_bytes):
    assert gs.AllreduceCallback(threshold_bytes=threshold).threshold_bytes == size_bytes


@pytest.mark.parametrize(
    "threshold", [0, -1, 1.5, True, "large", "10", "MB", "0 MB", "-1 MB", "1 TB", "1,5 MB", "9" * 400 + " MB"]
)
def test_a_threshold_of_no_size_is_refused(threshold):
    with pytest.raises(gs.InvalidArgument, match="threshold_bytes"):
        gs.AllreduceCallback(threshold_bytes=threshold)


# -- Memory of the gradients of a step --------------------------------------------------------------------------------

BASE = np.zeros(64)
views = st.tuples(st.integers(0, 60), st.integers(0, 12), st.integers(1, 3)).map(
    lambda cut: BASE[cut[0] : cut[0] + cut[1] : cut[2]]
)


@of_one_world
@given(st.lists(st.tuples(st.lists(views, max_size=6), st.booleans()), max_size=4))
def test_gradients_of_a_step_that_share_memory_are_refused_and_no_others(alone, steps):
    """At the hand-over or at the flush; step after step, whether their arrays come again or not."""
    sync = gs.AllreduceCallback("sum", alone)
    for views, repeats in steps:
        shares = any(np.shares_memory(one, other) for one, other in combinations(views, 2))
        for _ in range(1 + repeats):
            before = sync.statistics.gradients
            with pytest.raises(gs.InvalidArgument) if shares else nullcontext(), sync.backward():
                for number, view in enumerate(views):
                    sync(number, view)
            assert shares or sync.statistics.gradients == before + len(views)


def test_gradients_that_nothing_is_written_to_may_share_memory(alone):
    shared = np.broadcast_to(np.float64(3), (8,))
    sync = gs.AllreduceCallback("sum", alone)
    with sync.backward():
        futures = [sync(name, shared) for name in "ab"]
    first, second = (future.result() for future in futures)
    assert first.tolist() == second.tolist() == [3.0] * 8
    assert not np.shares_memory(first, second)


@pytest.mark.ranks(2, on=("shm", "fake"))
def test_gradients_that_nobody_keeps_are_not_taken_for_each_other(comm):
    put = arrays_of(comm).put
    sync = gs.AllreduceCallback("sum", comm, threshold_bytes=4000)
    for number in range(4):
        with sync.backward():
            futures = [sync(i, put(np.full(1000, number + i, np.float32))) for i in range(20)]
            del futures[:-1]
        assert (futures[0].numpy() == (number + 19) * 2).all()
