"""NCCL and memory: what queued work uses is not given away, and arrays of host and device mix; and done-callbacks."""

import gc
import threading
import weakref
from functools import partial

import numpy as np
import pytest

import gradsync as gs
from arrays import TOLERANCE, dtype_of
from backends.on_cuda import SIZE, assert_all, full, side_stream, total
from commands import wait_until
from obstacle import Obstacle

DELAYS = {"FAKE_CUPY_DELAY_MS": "1"}
delayed = pytest.mark.ranks(on={"fake": (2,), "gpu": (1, 2)}, environment=DELAYS)
several = pytest.mark.ranks(on={"fake": (3,), "gpu": (2,)})


@delayed
def test_gradients_that_the_caller_drops_are_kept_while_the_reduction_reads_them(comm):
    callback = gs.AllreduceCallback("sum", comm, threshold_bytes=3 * 4 * SIZE)
    callback.flush()
    for _ in range(2):
        producer = side_stream()
        fresh, futures = [], []
        with Obstacle(producer):
            with producer:
                late = full(0)
                late += comm.rank
                first = callback("late", late)
                callback("late too", full(1))
                callback("fills the bucket", full(1))
            # From here on the stream of the buckets is held up, and nothing else.
            for index in range(8):
                kept = full(comm.rank + index).reshape(SIZE // 50, 50).T  # a layout that is written back
                futures.append(callback(f"kept {index}", kept))
                callback(f"dropped {index}", full(comm.rank))
                del kept
                fresh.append(full(-7))
                full(np.nan)
            with producer:
                callback.flush()
            fresh += [full(-7) for _ in range(20)]
        assert_all(first.result(), total(comm, 0))
        for index, future in enumerate(futures):
            assert_all(future.result(), total(comm, index))
        for array in fresh:
            assert_all(array, -7)


@pytest.mark.ranks(on={"fake": (2,), "gpu": (2,)})
def test_buckets_are_packed_from_the_arrays_that_were_handed_over_however_far_the_gpu_lags(comm):
    """In more steps than there are tables of addresses: some are dropped while kernels that read them still wait."""
    import cupy

    callback = gs.AllreduceCallback("sum", comm)
    steps = []
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        for _ in range(2):  # the first contact of the ranks blocks the host
            with callback.backward():
                callback("a", cupy.zeros(3, np.float32))
                callback("b", cupy.zeros(5, np.float32))
        with Obstacle(side):
            for step in range(300):
                arrays = [cupy.asarray(np.full(size, step + comm.rank, np.float32)) for size in (3, 5)]
                with callback.backward():
                    steps.append([callback(name, array) for name, array in zip("ab", arrays, strict=True)])
        for step, futures in enumerate(steps):
            for future in futures:
                assert (future.numpy() == 2 * step + 1).all()


@delayed
def test_a_result_that_the_caller_drops_is_not_written_over_while_a_stream_reads_it(comm):
    import cupy

    callback = gs.AllreduceCallback("sum", comm)
    callback.flush()
    for step in range(3):
        own = side_stream()
        with own:
            copy = cupy.zeros(SIZE, np.float32)
            future = comm.asynchronous.all_gather(full(comm.rank + step, SIZE // comm.world_size))
            wait_until(future.done)
            result = future.result()
            other = callback("needs as much memory on its way", cupy.ones((50, SIZE // 50), np.float32).T)
            obstacle = Obstacle(own)
            copy += result
            del future, result
        with obstacle:
            callback.flush()  # not on the stream that is held up
            wait_until(other.done)
        assert sorted(set(copy.get(stream=own).tolist())) == [peer + step for peer in range(comm.world_size)]


@pytest.mark.ranks(2, on=("fake",), environment=DELAYS)
@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
def test_a_result_in_memory_that_another_thread_has_just_freed_waits_for_the_work_on_it(comm, name):
    """The other thread's work is still queued on the caller's stream."""
    import cupy

    comm.barrier()
    source = full(comm.rank, comm.world_size * SIZE)
    source = source[:SIZE] if name == "all_gather" else source
    empty, obstacles = cupy.empty, []

    def free_what_is_in_use():
        late = full(0, comm.world_size * SIZE)
        obstacles.append(Obstacle(cupy.cuda.get_current_stream()))
        late += 100

    def empty_late(*arguments):
        thread = threading.Thread(target=free_what_is_in_use)
        thread.start()
        thread.join()
        return empty(*arguments)

    getattr(comm.asynchronous, name)(source).result().get()
    cupy.empty = empty_late
    try:
        future = getattr(comm.asynchronous, name)(source)
    finally:
        cupy.empty = empty
        for obstacle in obstacles:
            obstacle.lift()
    assert obstacles
    wanted = np.repeat(np.arange(comm.world_size, dtype=np.float32), SIZE)
    np.testing.assert_array_equal(future.result().get(), wanted)


@pytest.mark.ranks(on={"fake": (1,), "gpu": (1,)})
def test_memory_for_a_result_does_not_belong_to_a_stream_on_which_another_thread_launches_meanwhile(comm):
    import cupy

    device, theirs, ours = cupy.cuda.Device(), side_stream(), side_stream()
    has_begun, may_end = threading.Event(), threading.Event()

    def launch():
        with device, theirs, comm._backend.launching(None, []):
            has_begun.set()
            may_end.wait(20.0)

    thread = threading.Thread(target=launch)
    thread.start()
    has_begun.wait(20.0)
    with ours:
        result = comm._backend.arrays.empty_like(full(0))  # as for a gradient that is read-only
        may_end.set()
        thread.join()
        result[...] = 1
        with Obstacle(ours):
            copy = result + 1
            del result
            with theirs:
                full(-7)
            theirs.synchronize()
    assert_all(copy, 2, ours)


@pytest.mark.ranks(on={"fake": (2,)})
def test_pinned_memory_of_results_on_the_host_is_free_once_they_are_there(comm):
    import cupy

    pinned, alloc = [], cupy.cuda.alloc_pinned_memory

    def noted(size):
        memory = alloc(size)
        pinned.append(weakref.ref(memory))
        return memory

    cupy.cuda.alloc_pinned_memory = noted
    try:
        futures = [comm.asynchronous.all_reduce(np.ones(SIZE)) for _ in range(3)]
        assert all((future.result() == comm.world_size).all() for future in futures)
    finally:
        cupy.cuda.alloc_pinned_memory = alloc
    gc.collect()
    assert len(pinned) >= len(futures)
    assert not any(memory() for memory in pinned)


@several
def test_sources_and_targets_on_the_host_and_on_the_device_mix(comm):
    import cupy

    n, rank = comm.world_size, comm.rank
    ranks = list(range(1, n + 1))
    on_device = cupy.full((n, 3), rank + 1, np.int32)

    def host(array):
        return array if isinstance(array, np.ndarray) else array.get()

    for source in (on_device, on_device.get()):
        for make in (cupy.zeros, np.zeros):
            whole, part, block = make((n * n, 3), np.int32), make((1, 3), np.int32), make((n, 3), np.int32)
            comm.all_gather(source, out=whole)
            assert host(whole)[::n, 0].tolist() == ranks
            comm.reduce_scatter(source, out=part)
            assert host(part).tolist() == [[total(comm, 1)] * 3]
            comm.scatter(source if rank == 0 else None, out=part)
            assert host(part).tolist() == [[1] * 3]
            comm.all_to_all(source, out=block)
            assert host(block)[:, 0].tolist() == ranks
            comm.exchange(source, dest=(rank + 1) % n, out=block, source=(rank - 1) % n)
            assert (host(block) == (rank - 1) % n + 1).all()
        for collective in (comm.all_gather, lambda s: comm.reduce_scatter(s, "max")):
            assert type(collective(source)) is type(source)


@several
def test_a_host_array_is_read_and_written_in_the_order_of_the_collectives(comm):
    n, array, other = comm.world_size, np.ones(SIZE), np.full(SIZE, 2.0)
    for step in range(3):
        with side_stream():
            futures = [comm.asynchronous.all_reduce(array) for _ in range(2)]
            futures.append(comm.asynchronous.all_reduce(other, "max", out=array))
        futures[-1].result()
        assert (array == 2 * n**step).all()
        assert (futures[0].result() == 2 * n**step).all()
        comm.all_reduce(other)
        comm.broadcast(array)


@pytest.mark.ranks(on={"fake": (3,), "gpu": (2,)})
def test_means_of_half_precision_are_divided_before_and_exactly(comm):
    """Of multiples of the number of ranks, so that no hop of NCCL's rounds: what is wrong then is the mean alone."""
    import cupy

    n, rank = comm.world_size, comm.rank
    uneven = [3000 - 10 * (n - 1), *[10] * (n - 1)]
    part, begin = slice(rank * 3000 // n, (rank + 1) * 3000 // n), sum(uneven[:rank])
    for name, bits in (("float16", 11), ("bfloat16", 8)):
        drawn = [n * np.random.default_rng([6, peer]).integers(0, 2**bits // n // n, 3000) for peer in range(n)]
        wanted = (sum(drawn) // n).astype(dtype_of(name))
        source = cupy.asarray(drawn[rank].astype(dtype_of(name)))
        reduced = comm.reduce(source, "mean", root=0, out=cupy.empty_like(source))
        assert rank != 0 or (reduced.get() == wanted).all()
        assert (comm.reduce_scatter(source, "mean").get() == wanted[part]).all()
        scattered = comm.reduce_scatter(source, "mean", sizes=uneven).get()
        assert (scattered == wanted[begin : begin + uneven[rank]]).all()
        assert (comm.all_reduce(source, "mean", out=cupy.empty_like(source)).get() == wanted).all()
        assert (source.get() == drawn[rank]).all()
    large = comm.all_reduce(cupy.full(5, 6e4, np.float16), "mean").get()
    assert (large == np.float16(6e4)).all()  # though float16 does not have their sum


@pytest.mark.ranks(on={"fake": (2,), "gpu": (1, 2)})
def test_values_that_are_not_finite_and_norms_are_found_on_the_device(comm):
    import cupy

    for name in TOLERANCE:
        values = np.random.default_rng(comm.rank).uniform(-1, 1, 3000).astype(dtype_of(name))
        if name == "float16":
            values[:] = 300  # whose squares the dtype does not have
        callback = gs.AllreduceCallback("sum", comm, nonfinite="raise", clip_norm=float("inf"))
        with callback.backward():
            future = callback("w", cupy.asarray(values))
        norm = np.linalg.norm(future.result().get().astype(np.complex128))
        np.testing.assert_allclose(float(callback.norm), norm, rtol=1e-6)
        for bad in (np.nan, np.inf, -np.inf):
            values[1234] = bad if comm.rank == 0 else 1
            with pytest.raises(gs.NonFiniteGradient), callback.backward():
                callback("w", cupy.asarray(values))


# -- Done-callbacks ---------------------------------------------------------------------------------------------------


@delayed
def test_done_follows_the_device_and_done_callbacks_see_the_value_on_a_thread_of_their_own(comm):
    import cupy

    callback, gradient = gs.AllreduceCallback("sum", comm), full(0)
    callback.flush()
    seen, called, producer = [], threading.Semaphore(0), side_stream()

    def look(future):
        with cupy.cuda.Stream(non_blocking=True) as own:
            seen.append((threading.get_ident(), float(future.result().get(stream=own)[0])))
        called.release()

    with Obstacle(producer) as obstacle:
        with producer:
            gradient += comm.rank
            future = callback("w", gradient)
        future.add_done_callback(look)
        callback.flush()
        future.add_done_callback(look)
        if obstacle.holds:
            assert not future.done()
            assert not called.acquire(blocking=False)
        assert (future.shape, future.dtype) == ((SIZE,), np.float32)
    for _ in range(2):
        called.acquire()
    assert future.done()
    assert future.exception() is None
    assert threading.get_ident() not in [thread for thread, _ in seen]
    assert [value for _, value in seen] == [total(comm, 0)] * 2


@delayed
def test_a_done_callback_cannot_wait_for_a_later_result(comm):
    """It would keep the thread that looks for failures."""
    callback = gs.AllreduceCallback("sum", comm)
    callback.flush()
    first = comm.asynchronous.all_reduce(full(0))
    wait_until(first.done)
    producer, source = side_stream(), full(comm.rank)
    refused, called = [], threading.Semaphore(0)

    def ask(question, _):
        try:
            question()
        except gs.FutureNotReady as error:
            refused.append(error)
        finally:
            called.release()

    with Obstacle(producer) as obstacle:
        with producer:
            on_host = comm.asynchronous.all_reduce(np.ones(SIZE, np.float32))
            gradient = callback("w", source)
        callback.flush()
        if obstacle.holds:
            for question in (on_host.result, on_host.wait, gradient.numpy):
                first.add_done_callback(partial(ask, question))
                called.acquire()
            assert len(refused) == 3
    assert (on_host.result() == comm.world_size).all()
    assert_all(gradient.result(), total(comm, 0))
