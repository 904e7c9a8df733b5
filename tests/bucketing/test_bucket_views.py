"""gradient_as_bucket_view and gradient_buffers(): gradients that live in the buckets."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_of, assert_close
from bucketing.reference import SPECS, THRESHOLDS, by_rank, given, reduced, step

SMALL = {name: SPECS[name] for name in ("matrix", "one", "double", "scalar", "empty", "two", "half")}


def bounds_of(array):
    begin = array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr
    return begin, begin + array.nbytes


def make(comm, parameters=SMALL, method="mean", **options):
    return gs.AllreduceCallback(method, comm, parameters=parameters, gradient_as_bucket_view=True, **options)


def check(comm, buffers, number, method="mean"):
    wanted, arrays = reduced(by_rank(comm.world_size, number, SMALL), method), arrays_of(comm)
    for name, array in buffers.items():
        assert_close(arrays.get(array), wanted[name], SMALL[name][1], comm.world_size)


def fill(comm, buffers, number):
    for name, values in given(comm.rank, number, SMALL).items():
        buffers[name][...] = arrays_of(comm).put(values)


@pytest.mark.ranks(2, on=("shm", "fake"))
def test_the_first_gradients_live_in_buckets_too(comm):
    """Also where the first comes by the short way, and a later one, a number, cannot."""
    arrays, sync = arrays_of(comm), make(comm, {"a": ((2,), "float64"), "b": ((), "float64")})
    futures = {}
    with sync.backward():
        futures["a"] = sync("a", arrays.put(np.full(2, comm.rank + 1.0)))
        futures["b"] = sync("b", arrays.put(np.asarray(comm.rank + 1.0)) if comm.backend == "nccl" else comm.rank + 1.0)
    for name, result in sync.results().items():
        assert_close(arrays.get(result), np.full(result.shape, 1.5), "float64", comm.world_size)
        assert result is futures[name].result()
    (low, middle), (begin, _) = (bounds_of(result) for result in sync.results().values())
    assert (low, middle) == (begin - 16, begin)  # one bucket


@pytest.mark.ranks(on={"shm": (2, 3), "fake": (2,), "gpu": (2,)})
@pytest.mark.parametrize("threshold_bytes", THRESHOLDS[1:])
def test_results_lie_in_the_buckets_wherever_gradients_come_from(comm, threshold_bytes):
    """Written where they live, handed over from elsewhere, by turns; in another order on each rank."""
    arrays, sync = arrays_of(comm), make(comm, threshold_bytes=threshold_bytes)
    buffers = sync.gradient_buffers()
    assert list(buffers) == list(SMALL)
    addresses = {name: bounds_of(array) for name, array in buffers.items()}
    ranges = sorted(bounds for bounds in addresses.values() if bounds[0] < bounds[1])
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
    for number in range(4):
        fill(comm, buffers, number)
        mine = given(comm.rank, number, SMALL)
        elsewhere = {name: arrays.put(mine[name]) for at, name in enumerate(SMALL) if (number + at + comm.rank) % 3}
        for name in elsewhere:
            buffers[name][...] = 0
        order = np.random.default_rng([comm.rank, number]).permutation(list(SMALL))
        results = step(sync, {str(name): elsewhere.get(str(name), buffers[str(name)]) for name in order})
        check(comm, buffers, number)
        assert {name: bounds_of(result) for name, result in results.items()} == addresses
        for name, array in elsewhere.items():  # what was handed over from elsewhere stays as it was
            assert arrays.get(array).tobytes() == mine[name].tobytes()


@pytest.mark.ranks(on={"shm": (1, 2), "fake": (2,)})
@pytest.mark.parametrize("missing", ["error", "zero"])
def test_a_program_need_not_ask_for_the_buffers(comm, missing):
    """Its own arrays stay as they are, from the first gradient on; the futures give the buckets."""
    arrays, sync = arrays_of(comm), make(comm, missing=missing)
    for number in range(2):
        mine = {name: arrays.put(values) for name, values in given(comm.rank, number, SMALL).items()}
        results = step(sync, mine)
        check(comm, results, number)
        assert all(sync.results()[name] is result for name, result in results.items())
        for name, values in given(comm.rank, number, SMALL).items():
            assert arrays.get(mine[name]).tobytes() == values.tobytes()


@pytest.mark.ranks(2, on=("shm", "fake"))
def test_buffers_have_the_form_of_parameters_and_can_be_asked_for_again(comm):
    arrays = arrays_of(comm)
    parameters = {name: arrays.put(values) for name, values in given(0, 0, SMALL).items()}
    sync = make(comm, parameters)
    old = sync.gradient_buffers()
    for number in range(3):
        new = sync.gradient_buffers()
        assert not any(arrays.get(array).any() for array in new.values())
        for buffers in (new, old):  # those of an earlier call are arrays like any other
            fill(comm, buffers, number)
            step(sync, buffers)
            check(comm, new, number)
        old = new
    listed = make(comm, list(parameters.values()), name="listed")
    buffers = dict(zip(SMALL, listed.gradient_buffers(), strict=True))
    fill(comm, buffers, 1)
    with listed.backward():
        for name in reversed(SMALL):
            listed(parameters[name], buffers[name])
    check(comm, buffers, 1)


@pytest.mark.ranks(2, on=("shm", "fake"))
def test_another_place_in_the_buckets_is_refused_and_leaves_no_trace(comm):
    sync = make(comm)
    buffers = sync.gradient_buffers()
    for number in range(3):
        fill(comm, buffers, number)
        for wrong in (buffers["two"], buffers["one"][::-1]):
            with pytest.raises(gs.InvalidArgument):
                sync("one", wrong)
        sync("one", buffers["one"].reshape(5, 8).reshape(-1) if number else buffers["one"])
        with pytest.raises(gs.InvalidArgument):
            sync("two", buffers["one"])
        with pytest.raises(gs.InvalidArgument):
            sync.gradient_buffers()  # in the middle of a step
        for name, array in buffers.items():
            if name != "one":
                sync(name, array)
        sync.flush()
        check(comm, buffers, number)


@pytest.mark.ranks(2, on=("shm", "fake"))
def test_ranks_that_need_other_memory_are_a_mismatch_and_too_much_is_unavailable(comm):
    with pytest.raises(gs.PlanMismatch):
        make(comm, SMALL | {"one": ((40 + comm.rank,), "float32")}, name="other").gradient_buffers()
    if comm.backend == "shm":
        with pytest.raises(gs.BackendUnavailable):
            make(comm, {"a": ((2**50,), "float32")}).gradient_buffers()
    with pytest.raises(gs.InvalidArgument):
        gs.AllreduceCallback("mean", comm, parameters=SMALL).gradient_buffers()


@pytest.mark.ranks(2)
def test_buffers_outlive_their_communicator(comm):
    group = comm.split(0)
    sync = make(group, method="sum")
    buffers = sync.gradient_buffers()
    fill(comm, buffers, 0)
    step(sync, buffers)
    group.close()
    check(comm, buffers, 0, "sum")
    with pytest.raises(gs.CommunicatorClosed):
        step(sync, buffers)
    fill(comm, buffers, 1)
    step(gs.AllreduceCallback("sum", comm), buffers)  # for another callback they are arrays like any other
    check(comm, buffers, 1, "sum")


def test_buffers_are_a_read_only_mapping(alone):
    """`buffers["w"] = g` would write nothing into the buffer."""
    buffers = make(alone, {"w": np.zeros(3)}).gradient_buffers()
    with pytest.raises(TypeError):
        buffers["w"] = np.ones(3)
