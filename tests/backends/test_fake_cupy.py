"""The fake of CuPy itself: that it breaks what a GPU would break. What it models: fake_cupy/cupy/__init__.py."""

import threading
import time

import numpy as np
import pytest

from backends.on_cuda import HANGS, meet
from obstacle import Obstacle

FLOAT, SUM, AVG, MAX = 7, 0, 4, 2


@pytest.mark.ranks(1, on=("fake",))
def test_work_on_a_stream_waits_for_no_other_stream(comm):
    import cupy

    side, array = cupy.cuda.Stream(non_blocking=True), cupy.zeros(4, np.float32)
    cupy.cuda.Device().synchronize()
    with Obstacle(side):
        with side:
            array += 1
        assert array.get().tolist() == [0] * 4
    cupy.cuda.Stream.null.wait_event(side.record())
    assert array.get().tolist() == [1] * 4


@pytest.mark.ranks(1, on=("fake",))
def test_the_null_stream_and_blocking_streams_wait_for_each_other(comm):
    import cupy

    blocking, array = cupy.cuda.Stream(), cupy.zeros(4, np.float32)
    with Obstacle(blocking) as obstacle:
        with blocking:
            array += 1
        array *= 5
        assert not cupy.cuda.Stream.null.done
        obstacle.lift()
    assert array.get().tolist() == [5] * 4


@pytest.mark.ranks(1, on=("fake",))
def test_events_time_the_work_between_them(comm):
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    begin = stream.record()
    stream.launch_host_func(time.sleep, 0.05)
    end = stream.record()
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="NotReady"):
        cupy.cuda.get_elapsed_time(begin, end)
    end.synchronize()
    assert cupy.cuda.get_elapsed_time(begin, end) >= 50
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="InvalidResourceHandle"):
        cupy.cuda.get_elapsed_time(begin, stream.record(cupy.cuda.Event(disable_timing=True)))


@pytest.mark.ranks(1, on=("fake",))
def test_freed_memory_goes_to_the_next_array_while_a_stream_still_reads_it(comm):
    import cupy

    assert np.isnan(cupy.empty(1000).get()).all()
    side, result, freed = cupy.cuda.Stream(non_blocking=True), cupy.zeros(4, np.float32), cupy.ones(4, np.float32)
    address = freed.data.ptr
    cupy.cuda.Device().synchronize()
    with Obstacle(side):
        with side:
            result += freed
        del freed
        taken = cupy.full(4, 2, np.float32)
        assert taken.data.ptr == address
        cupy.cuda.Stream.null.synchronize()
    assert result.get(stream=side).tolist() == [2] * 4
    del taken
    with side:
        assert cupy.empty(4, np.float32).data.ptr != address  # memory of another stream


@pytest.mark.ranks(1, on=("fake",))
def test_arrays_do_not_mix_with_host_memory(comm):
    import cupy

    host, array = np.arange(12, dtype=np.float32), cupy.arange(12, dtype=np.float32)
    mixed = np.asarray, np.sum, lambda a: host + a, lambda a: a + host, lambda a: np.copyto(host, a), np.from_dlpack
    for mix in mixed:
        with pytest.raises((TypeError, RuntimeError)):
            mix(array)


def raw_communicator(comm):
    """A communicator of NCCL beside gradsync's."""
    from cupy.cuda import nccl

    unique_id = comm.objects.broadcast(nccl.get_unique_id() if comm.rank == 0 else None)
    return nccl.NcclCommunicator(comm.world_size, unique_id, comm.rank)


@pytest.mark.ranks(2, on=("fake",))
def test_sums_go_round_a_ring_and_are_rounded_at_every_hop(comm):
    import cupy
    import ml_dtypes

    raw = raw_communicator(comm)
    half = cupy.full(1, 2**-8 if comm.rank else 1.0, ml_dtypes.bfloat16)
    raw.allReduce(half.data.ptr, half.data.ptr, 1, 9, SUM, 0)
    assert float(half) == float(ml_dtypes.bfloat16(1 + 2**-8)) == 1.0
    number = cupy.asarray(np.array([2, np.nan] if comm.rank else [np.nan, np.nan], np.float32))
    raw.allReduce(number.data.ptr, number.data.ptr, 2, FLOAT, MAX, 0)
    np.testing.assert_array_equal(number.get(), [2, np.nan])
    whole = cupy.full(1, -3 * comm.rank, np.int32)
    raw.allReduce(whole.data.ptr, whole.data.ptr, 1, 2, AVG, 0)
    assert whole.get().tolist() == [-1]
    raw.destroy()


@pytest.mark.ranks(2, on=("fake",))
def test_ranks_that_call_different_collectives_get_an_error_that_says_which(comm):
    import cupy

    raw, array = raw_communicator(comm), cupy.ones(4, np.float32)
    raw.allReduce(array.data.ptr, array.data.ptr, 4, FLOAT, SUM, 0)
    raw.allReduce(array.data.ptr, array.data.ptr, 4 - comm.rank, FLOAT, SUM, 0)
    cupy.cuda.Stream.null.synchronize()
    with pytest.raises(cupy.cuda.nccl.NcclError, match=r"rank 0: allReduce\(count 4.*rank 1: allReduce\(count 3"):
        raw.check_async_error()
    raw.abort()


@pytest.mark.ranks(2, on=("fake",), environment=HANGS)
def test_with_hang_they_hang_in_silence_until_an_abort(comm, tmp_path):
    import cupy

    raw, array, side = raw_communicator(comm), cupy.ones(4, np.float32), cupy.cuda.Stream(non_blocking=True)
    raw.allReduce(array.data.ptr, array.data.ptr, 4, FLOAT, SUM, side.ptr)
    raw.allReduce(array.data.ptr, array.data.ptr, 4 - comm.rank, FLOAT, SUM, side.ptr)
    event = side.record()
    meet(tmp_path, comm, "both have launched")
    raw.check_async_error()
    assert not event.done
    raw.abort()
    event.synchronize()


@pytest.mark.ranks(2, on=("fake",))
def test_the_host_waits_where_ranks_meet_for_the_first_time(comm, tmp_path):
    import cupy

    raw, array = raw_communicator(comm), cupy.ones(4, np.float32)
    returned = threading.Event()

    def reduce():
        cupy.cuda.Device(comm.rank).use()
        raw.allReduce(array.data.ptr, array.data.ptr, 4, FLOAT, SUM, 0)
        returned.set()

    if comm.rank == 0:
        threading.Thread(target=reduce).start()
    meet(tmp_path, comm, "rank 0 has called")
    assert not returned.is_set()
    meet(tmp_path, comm, "rank 1 has not yet called")
    if comm.rank == 1:
        reduce()
    returned.wait()
    assert array.get().tolist() == [2] * 4
    raw.destroy()
