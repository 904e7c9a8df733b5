"""register_hook: functions that reduce the buckets; and the hooks of examples/hooks.py."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_of, assert_close, assert_same_on_all_ranks, dtype_of
from bucketing.reference import SPECS, by_rank, given, reduced, step

EXAMPLE = Path(__file__).parents[2] / "examples" / "hooks.py"


@pytest.mark.ranks(2, on=("shm", "fake", "gpu", "mpi"))
@pytest.mark.parametrize("is_in_place", [True, False])
def test_a_hook_that_does_what_is_done_without_gives_the_same(comm, is_in_place):
    arrays, seen = arrays_of(comm), {}

    def hook(bucket):
        assert (bucket.buffer.ndim, bucket.communicator, bucket.op) == (1, comm, "mean")
        seen[bucket.index] = bucket.names
        if is_in_place:
            return comm.all_reduce(bucket.buffer, bucket.op)  # returning the buffer is no mistake
        bucket.buffer[...] = comm.all_reduce(bucket.buffer.copy(), bucket.op)
        return None

    sync = gs.AllreduceCallback("mean", comm, threshold_bytes=700)
    for number in range(3):
        seen.clear()
        sync.register_hook(None if number == 1 else hook)
        with sync.backward():
            futures = {name: sync(name, arrays.put(values)) for name, values in given(comm.rank, number).items()}
            with pytest.raises(gs.InvalidArgument):  # in the middle of a step
                sync.register_hook(None)
        for name, wanted in reduced(by_rank(comm.world_size, number)).items():
            assert_close(arrays.get(futures[name].result()), wanted, SPECS[name][1], comm.world_size)
        assert sorted(seen) == list(range(len(seen)))
        assert sorted(name for names in seen.values() for name in names) == ([] if number == 1 else sorted(SPECS))


@pytest.mark.ranks(2, on=("shm", "fake"))
@pytest.mark.parametrize(
    ("what", "error"), [("copy", gs.InvalidArgument), ("text", gs.InvalidArgument), ("raise", KeyError)]
)
def test_a_hook_that_fails_fails_the_step_and_the_next_is_right(comm, what, error):
    def hook(bucket):
        if what == "raise":
            raise KeyError("no such hook")
        return comm.all_reduce(bucket.buffer.copy(), bucket.op) if what == "copy" else "no buffer"

    sync, arrays = gs.AllreduceCallback("mean", comm), arrays_of(comm)
    sync.register_hook(hook)
    futures = [sync(name, arrays.put(np.ones(3))) for name in "ab"]
    with pytest.raises(error):
        sync.flush()
    assert all(isinstance(future.exception(), error) for future in futures)
    sync.register_hook(None)
    assert (arrays.get(step(sync, {"a": arrays.put(np.ones(3))})["a"]) == 1).all()


@pytest.mark.parametrize("wrong", [3, "float16", SimpleNamespace])
def test_what_is_no_function_is_refused(wrong):
    with pytest.raises(gs.InvalidArgument):
        gs.AllreduceCallback().register_hook(wrong)


# -- examples/hooks.py -------------------------------------------------------------------------------------------------

N = 1024 + 300  # neither a square, nor whole blocks
#: How far a mean may be from the truth, relative to its norm: a rounding, a step of 127, a projection.
ERRORS = {"float16": 2e-3, "bfloat16": 2e-2, "Int8": 3e-2, "PowerSGD": 1.01}


@cache
def example():
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


def make(kind):
    made = getattr(example(), kind)
    return made() if isinstance(made, type) else made


def gradients(ranks, dtype="float32", size=N):
    return [np.random.default_rng(rank).standard_normal(size).astype(dtype_of(dtype)) for rank in range(ranks)]


def reduce_by(comm, hook, values, op="mean", name="w"):
    """Hands a hook one bucket, as a callback does; the result on the host."""
    arrays = arrays_of(comm)
    bucket = SimpleNamespace(buffer=arrays.put(values), names=(name,), index=0, communicator=comm, op=op)
    with np.errstate(invalid="ignore"):
        assert hook(bucket) is None
    return arrays.get(bucket.buffer)


@pytest.mark.ranks(on={"shm": (1, 3), "fake": (2,), "gpu": (2,)})
@pytest.mark.parametrize("kind", ERRORS)
def test_hooks_of_the_example_are_right_and_give_the_same_bits_on_all_ranks(comm, place, kind):
    """Each dtype and operator within what the hook promises."""
    if (place, kind) == ("fake", "PowerSGD"):
        return  # the fake CuPy has no linalg
    results, n = [], comm.world_size
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        mine = gradients(n, dtype)
        for op in ("sum", "mean"):
            results.append(reduce_by(comm, make(kind), mine[comm.rank], op))
            assert results[-1].dtype == dtype_of(dtype)
            wanted = np.sum([values.astype(np.float64) for values in mine], 0) / (n if op == "mean" else 1)
            error = np.linalg.norm(results[-1].astype(np.float64) - wanted)
            assert error <= max(ERRORS[kind], ERRORS.get(dtype, 0)) * np.linalg.norm(wanted)
    assert_same_on_all_ranks(comm, results)


@pytest.mark.ranks(2, on=("shm", "gpu"))
@pytest.mark.parametrize("kind", ["Int8", "PowerSGD"])
def test_what_a_step_loses_comes_in_the_next(comm, kind):
    """So the mean of many steps with the same gradients is the truth, but for one step's error."""
    hook, steps, mine = make(kind), 50, gradients(comm.world_size)
    truth = np.mean([values.astype(np.float64) for values in mine], 0)
    results = [reduce_by(comm, hook, mine[comm.rank]).astype(np.float64) for _ in range(steps)]
    assert np.linalg.norm(np.mean(results, 0) - truth) < np.linalg.norm(results[0] - truth) / 5


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["Int8", "PowerSGD"])
def test_nan_spoils_one_step_and_other_gradients_begin_anew(comm, kind):
    mine, hook = gradients(comm.world_size)[comm.rank], make(kind)
    first = reduce_by(comm, hook, mine)
    for bad in (np.nan, np.inf):
        spoilt = mine.copy()
        spoilt[700] = bad if comm.rank else spoilt[700]
        assert not np.isfinite(reduce_by(comm, hook, spoilt)[700])
        assert np.isfinite(reduce_by(comm, hook, mine)).all()
    reduce_by(comm, hook, gradients(comm.world_size, size=2 * N)[comm.rank])
    for name in ("w", "v"):
        assert (reduce_by(comm, hook, mine, name=name) == first).all()
    hook.reset()  # as gs.rebuild() does
    assert (reduce_by(comm, hook, mine) == first).all()
    for size in (0, 200):  # zeros, as before the first batch; too small to be compressed
        assert not reduce_by(comm, make(kind), np.zeros(size, np.float32)).any()
