"""Checks of the NCCL communicator's streams, memory, callbacks and steady loops; run inside rank processes.

The checks run on a GPU and on the stand-in. An Obstacle holds up work that must still be running at some moment.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import cupy
import numpy as np

import gradsync as gs
from contract import expect, wait_until
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.nccl.connect import connect
from kits import bring_to_rest

SIZE = 5000
SECONDS = 30.0  # deadline of waits that should be short
IS_STAND_IN = not hasattr(cupy, "RawKernel")
_SPIN = """
extern "C" __global__ void spin(long long cycles) {
    const long long begin = clock64();
    while (clock64() - begin < cycles) {}
}
"""
_SPIN_CYCLES = 200_000_000  # 100 ms at 2 GHz


class Obstacle:
    """Work that holds up a stream: until it is lifted, or, on a GPU, for 100 ms."""

    def __init__(self) -> None:
        self._lifted = threading.Event()
        self._spin = None if IS_STAND_IN else cupy.RawKernel(_SPIN, "spin")

    def put_on(self, stream: Any) -> None:
        if self._spin is None:
            stream.launch_host_func(lambda _: self._lifted.wait(SECONDS), None)
            return
        with stream:
            self._spin((1,), (1,), (np.int64(_SPIN_CYCLES),))

    def lift(self) -> None:
        self._lifted.set()


@contextmanager
def held_up(*streams: Any) -> Iterator[None]:
    """Holds streams up while the body runs, for all that it queues there."""
    obstacle = Obstacle()
    for stream in streams:
        obstacle.put_on(stream)
    try:
        yield
    finally:
        obstacle.lift()


def client_of(comm: Any) -> Any:
    return comm._backend.client


def side_stream() -> Any:
    """Returns a stream that waits for nothing but the present work of the current one."""
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.wait_event(cupy.cuda.get_current_stream().record())
    return stream


def full(value: float, size: int = SIZE) -> Any:
    return cupy.full(size, value, np.float32)


def assert_all(array: Any, wanted: float, stream: Any = None) -> None:
    got = array.get(stream=stream)
    assert (got == wanted).all(), f"{got[:3]} where {wanted} was wanted"


def total(comm: Any, value: float) -> float:
    """The sum over the ranks of rank + value."""
    n = comm.world_size
    return n * value + n * (n - 1) / 2


# -- Streams ------------------------------------------------------------------------------------------------------


def reduce_what_slow_streams_make(comm: Any) -> None:
    """One producer, then several for the gradients of one bucket; the results are used on the current stream."""
    for threshold_bytes in (1, 2 * 4 * SIZE, 10**7):
        callback = gs.AllreduceCallback("sum", comm, threshold_bytes=threshold_bytes)
        for number_of_streams in (1, 3, 4):
            gradients = [full(0) for _ in range(4)]
            streams = [side_stream() for _ in range(number_of_streams)]
            with held_up(*streams):
                for index, gradient in enumerate(gradients):
                    with streams[index % number_of_streams]:
                        gradient += comm.rank + index
                        callback(index, gradient)
                callback.flush()
            for index, gradient in enumerate(gradients):
                assert_all(gradient, total(comm, index))


def use_results_on_other_streams(comm: Any) -> None:
    callback = gs.AllreduceCallback("sum", comm)
    producer = side_stream()
    ways: list[Callable[[Any, Any], Any]] = [
        lambda future, stream: future.result(),  # on the current stream
        lambda future, stream: future.wait(),
        lambda future, stream: future.wait(stream),
        lambda future, stream: future.wait(stream.ptr),
    ]
    for step, way in enumerate(ways):
        gradient, copy = full(0), full(0)
        consumer = side_stream()
        producer.wait_event(cupy.cuda.get_current_stream().record())
        with held_up(producer):
            with producer:
                gradient += comm.rank + step
                future = callback("w", gradient)
                callback.flush()  # orders the producer's stream, which is not the consumer's
            if step < 2:
                with consumer:
                    way(future, consumer)
            else:
                way(future, consumer)
            with consumer:
                copy += gradient
        assert_all(copy, total(comm, step), consumer)


def reuse_memory_at_once(comm: Any) -> None:
    """Memory of gradients that the caller drops is reused at once, while the reduction may still read it."""
    callback = gs.AllreduceCallback("sum", comm, threshold_bytes=3 * 4 * SIZE)
    for _ in range(3):
        producer = side_stream()
        fresh, futures = [], []
        with held_up(producer):
            with producer:
                late = full(0)
                late += comm.rank
                first = callback("late", late)
                callback("late too", full(1))
                callback("fills the bucket", full(1))
            # From here on the bucket stream is held up, and nothing else.
            for index in range(12):
                kept = cupy.full((SIZE // 50, 50), comm.rank + index, np.float32).T  # a layout that is staged
                futures.append(callback(f"kept {index}", kept))
                callback(f"dropped {index}", full(comm.rank))
                del kept
                fresh.append(full(-7))
                full(np.nan)
            with producer:
                callback.flush()  # frees the dropped gradients, and orders the producer's stream only
            fresh += [full(-7) for _ in range(20)]
        bring_to_rest(comm)
        assert_all(first.result(), total(comm, 0))
        for index, future in enumerate(futures):
            assert_all(future.result(), total(comm, index))
        for array in fresh:
            assert_all(array, -7)
        del first, late, futures, future


def take_memory_that_another_thread_has_just_freed(comm: Any) -> None:
    """On the caller's stream, in the middle of an asynchronous call: its result lies where late work still writes."""
    size = comm.world_size * SIZE
    for collective in (comm.asynchronous.all_gather, comm.asynchronous.all_to_all):
        source, obstacle, empty = full(comm.rank, size), Obstacle(), comm._arrays.empty

        def free_what_is_in_use(o: Obstacle = obstacle) -> None:
            late = full(0, size)
            o.put_on(cupy.cuda.get_current_stream())
            late += 100

        def empty_late(*args: Any, free: Any = free_what_is_in_use, empty: Any = empty) -> Any:
            thread = threading.Thread(target=free)
            thread.start()
            thread.join()
            return empty(*args)

        comm._arrays.empty = empty_late
        part = source[:SIZE] if collective == comm.asynchronous.all_gather else source
        future = collective(part)
        comm._arrays.empty = empty
        if IS_STAND_IN:  # where the obstacle stays
            began = time.monotonic()
            while not future.done() and time.monotonic() - began < 0.3:
                time.sleep(0.01)
        obstacle.lift()
        wanted = np.repeat(np.arange(comm.world_size, dtype=np.float32), SIZE)
        assert (future.result().get() == wanted).all()


def finish_late(comm: Any) -> None:
    """done() and the flight recorder follow the device; done-callbacks run on a thread of the communicator, and see
    the value."""
    callback = gs.AllreduceCallback("sum", comm)
    seen: list[tuple[int, float]] = []
    called = threading.Semaphore(0)

    def look(future: Any) -> None:
        with cupy.cuda.Stream(non_blocking=True) as own:
            seen.append((threading.get_ident(), float(future.result().get(stream=own)[0])))
        called.release()

    producer = side_stream()
    gradient = full(0)
    producer.wait_event(cupy.cuda.get_current_stream().record())
    with held_up(producer):
        with producer:
            gradient += comm.rank
            future = callback("w", gradient)
        future.add_done_callback(look)
        future.add_done_callback(lambda _: sys.exit("a done-callback may not end the communicator's thread"))
        callback.flush()
        future.add_done_callback(look)
        assert not future.done()
        assert (future.shape, future.dtype) == ((SIZE,), np.float32)
        assert not called.acquire(blocking=False)
        bucket, flush = comm.recorder.entries()[-2:]
        assert bucket.what.headline().endswith(" [w]")
        assert (bucket.ended is None, flush.ended is None) == (True, False)
    bring_to_rest(comm)
    assert future.done()
    ended = next(entry for entry in comm.recorder.entries() if entry.number == bucket.number).ended
    assert ended is not None
    assert ended >= flush.ended
    assert all(called.acquire(timeout=SECONDS) for _ in range(2))
    assert threading.get_ident() not in [thread for thread, _ in seen]
    assert [value for _, value in seen] == [total(comm, 0)] * 2
    assert future.exception() is None


def wait_in_a_callback(comm: Any) -> None:
    """A done-callback must not keep the communicator's thread, which looks for failures, waiting for a later result."""
    callback = gs.AllreduceCallback("sum", comm)
    callback("w", full(0))
    callback.flush()
    refused: SimpleQueue[str] = SimpleQueue()
    first = comm.asynchronous.all_reduce(full(0))
    bring_to_rest(comm)
    producer = side_stream()
    with held_up(producer):
        with producer:
            in_host_memory = comm.asynchronous.all_reduce(np.ones(SIZE, np.float32))
            gradient = callback("w", full(comm.rank))
        callback.flush()
        for ask in (in_host_memory.result, in_host_memory.wait, gradient.numpy):
            first.add_done_callback(lambda _, ask=ask: refused.put(str(expect(gs.FutureNotReady, ask))))
            assert "a done-callback cannot wait for a collective" in refused.get(timeout=SECONDS)
    assert (in_host_memory.result() == comm.world_size).all()
    assert_all(gradient.result(), total(comm, 0))


def keep_callbacks_from_the_watcher(comm: Any) -> None:
    """One thread of the process looks after all communicators, and no callback keeps it from that."""
    groups = [comm.new_group(range(comm.world_size)) for _ in range(3)]
    watchers = [thread for thread in threading.enumerate() if thread.name == "gradsync-nccl-watcher"]
    assert len(watchers) == 1
    future = comm.asynchronous.all_reduce(full(0))
    is_in_it, goes_on, called = threading.Event(), threading.Event(), threading.Event()

    def dawdle(_: Any) -> None:
        is_in_it.set()
        goes_on.wait(SECONDS)

    producer = side_stream()
    with held_up(producer):
        with producer:
            future = comm.asynchronous.all_reduce(full(0))
        future.add_done_callback(dawdle)
        future.add_done_callback(lambda _: called.set())
    assert is_in_it.wait(SECONDS)
    comm.barrier()
    began = time.monotonic()
    if comm.rank == comm.world_size - 1:
        groups[1].abort("enough")
    wait_until(lambda: comm.closed and groups[2].closed)
    assert time.monotonic() - began < SECONDS / 2
    assert not called.is_set()
    goes_on.set()
    assert called.wait(SECONDS)
    for group in (*groups, comm):
        with contextlib.suppress(gs.GradsyncError):
            group.close()


def keep_callbacks_of_a_failure_from_the_watcher(comm: Any) -> None:
    """A failure ends work of two communicators: callbacks of the first do not keep the watcher from the second."""
    groups = [comm.new_group(range(comm.world_size)) for _ in range(2)]
    callbacks = [gs.AllreduceCallback("sum", group) for group in groups]
    is_in_it, goes_on, threads = threading.Event(), threading.Event(), []

    def dawdle(_: Any) -> None:
        threads.append(threading.current_thread().name)
        is_in_it.set()
        goes_on.wait(SECONDS)

    for group, callback in zip(groups, callbacks, strict=True):
        callback("w", full(0))
        callback.flush()
        group.barrier()
    producer = side_stream()
    with held_up(producer):
        with producer:
            for group, callback in zip(groups, callbacks, strict=True):
                group.asynchronous.all_reduce(full(0)).add_done_callback(dawdle)
                callback("w", full(0)).add_done_callback(dawdle)
                callback.flush()
        client_of(comm).barrier("all ranks have launched")
        if comm.rank == comm.world_size - 1:
            comm.abort("enough")
        wait_until(lambda: comm.closed and all(group.closed for group in groups))
        assert is_in_it.wait(SECONDS)
    goes_on.set()
    wait_until(lambda: len(threads) == 4)
    assert set(threads) == {"gradsync-nccl-callbacks"}
    for group in (*groups, comm):
        with contextlib.suppress(gs.GradsyncError):
            group.close()


def give_pinned_memory_back(comm: Any) -> None:
    """Pinned memory of results in host memory is free once the results are there, though their futures are kept."""
    pinned: list[Any] = []
    alloc = cupy.cuda.alloc_pinned_memory

    def noted(size: int) -> Any:
        memory = alloc(size)
        pinned.append(weakref.ref(memory))
        return memory

    cupy.cuda.alloc_pinned_memory = noted
    futures = [comm.asynchronous.all_reduce(np.ones(SIZE)) for _ in range(3)]
    assert all((future.result() == comm.world_size).all() for future in futures)
    gc.collect()
    assert len(pinned) >= len(futures)
    assert all(memory() is None for memory in pinned)


class ForeignStream:
    """A stream of a library with CUDA's stream protocol."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream.ptr


class TorchStream:
    def __init__(self, stream: Any) -> None:
        self.cuda_stream = stream.ptr


def run_on_given_streams(comm: Any) -> None:
    def reduce(array: Any, stream: Any) -> None:
        comm.all_reduce(array, stream=stream)

    def broadcast(array: Any, stream: Any) -> None:
        comm.broadcast(array, comm.world_size - 1, stream=stream)

    for given in (lambda stream: stream, lambda stream: stream.ptr, ForeignStream, TorchStream):
        for collective, wanted in ((reduce, total(comm, 3)), (broadcast, comm.world_size - 1 + 3)):
            array, after = full(3), full(0)
            side = side_stream()
            with held_up(side):
                with side:
                    array += comm.rank
                collective(array, given(side))
                # NCCL runs the collectives of a communicator one after the other, whatever their streams.
                comm.all_reduce(after)
            assert_all(array, wanted, side)
            assert_all(after, 0)


# -- A loop that repeats itself --------------------------------------------------------------------------------------


class Calls:
    """Counts calls by name, while it is counting."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.counting = False

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.counting:
                self.counts[name] = self.counts.get(name, 0) + 1
            return function(*args, **kwargs)

        return counted

    def watch(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self.wrap(name, getattr(owner, name)))


class CountingModule:
    """A cupy.RawModule whose launches are counted."""

    calls: Calls
    module = cupy.RawModule

    def __init__(self, **options: Any) -> None:
        self._module = self.module(**options)

    def get_function(self, name: str) -> Any:
        return self.calls.wrap(name, self._module.get_function(name))


def refuse_wrong_streams(comm: Any) -> None:
    """One rank's mistake: the others go on."""
    array = full(comm.rank)
    if comm.rank == 0:
        wrong: list[Any] = ["x", 1.5, object(), True, array]
        if cupy.cuda.runtime.getDeviceCount() > 1:
            with cupy.cuda.Device((cupy.cuda.Device().id + 1) % cupy.cuda.runtime.getDeviceCount()):
                wrong.append(cupy.cuda.Stream(non_blocking=True))
        for stream in wrong:
            for collectives in (comm, comm.asynchronous):
                refused = partial(collectives.all_reduce, array, stream=stream)
                error = expect(gs.InvalidArgument, refused, "needs a stream")
                assert (stream is array) == ("got an array" in str(error))
                assert "out=" not in str(error)
    future = comm.asynchronous.all_reduce(array)
    expect(gs.InvalidArgument, partial(future.wait, "x"), "needs a stream")
    assert_all(future.result(), sum(range(comm.world_size)))


def refuse_streams_that_are_capturing(comm: Any) -> None:
    """One rank captures a CUDA graph: that is refused, spoils neither the graph nor the step, and the others go on."""
    array, out, first, second = full(comm.rank), full(0), full(comm.rank), full(comm.rank)
    callback = gs.AllreduceCallback("sum", comm)
    for step in range(3):  # gradients that are new, and that come again
        callback(1, first)
        if comm.rank == 0:
            graph_stream = cupy.cuda.Stream(non_blocking=True)
            other = cupy.cuda.Stream(non_blocking=True)
            graph_stream.wait_event(cupy.cuda.get_current_stream().record())
            graph_stream.begin_capture()
            refused: list[Callable[[], Any]] = [
                *(partial(c.all_reduce, array, stream=graph_stream) for c in (comm, comm.asynchronous)),
                partial(comm.all_reduce, array, stream=graph_stream.ptr),
            ]
            within: list[Callable[[], Any]] = [
                *(partial(c.all_reduce, array) for c in (comm, comm.asynchronous)),
                *(partial(c.all_reduce, array, stream=other) for c in (comm, comm.asynchronous)),
                comm.barrier,
                partial(gs.bcast_list_, [array], communicator=comm),
                partial(callback, 2, second),
                callback.flush,
            ]
            if comm.world_size > 1:  # the mean of one rank's is what they are
                within.append(partial(gs.average_gradients, {"a": array}, communicator=comm))
            for call in refused:
                expect(gs.InvalidArgument, call, "cannot be part of a CUDA graph")
            with graph_stream:
                for call in within:
                    expect(gs.InvalidArgument, call, "cannot be part of a CUDA graph")
                cupy.add(array, 1, out=out)
            graph_stream.end_capture().launch(graph_stream)
            assert_all(out, array.get()[0] + 1, graph_stream)
            if step == 0:  # the null stream would wait for what is captured
                waited_for = cupy.cuda.Stream()
                waited_for.begin_capture()
                for call in within:
                    expect(gs.InvalidArgument, call, "cannot be part of a CUDA graph")
                waited_for.end_capture()
        futures = [callback(2, second)]
        callback.flush()
        for future in futures:
            future.result()
        comm.all_reduce(array)
        wanted = sum(range(comm.world_size)) * comm.world_size**step
        for reduced in (array, first, second):
            assert_all(reduced, wanted)


def outlive_a_capture_that_forbids_all_threads_to_look(comm: Any) -> None:
    """In CUDA's global mode, which is PyTorch's, the watcher's questions spoil a capture; that is no failed GPU."""
    producer, array = side_stream(), full(0)
    with held_up(producer):
        with producer:
            array += comm.rank
            future = comm.asynchronous.all_reduce(array)
        graph_stream = cupy.cuda.Stream(non_blocking=True)
        graph_stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        try:
            if IS_STAND_IN:
                wait_until(lambda: not _is_capturing_well(graph_stream))
            assert not future.done() or not IS_STAND_IN
        finally:
            with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
                graph_stream.end_capture()
    assert_all(future.result(), sum(range(comm.world_size)))
    comm.all_reduce(array)


def _is_capturing_well(stream: Any) -> bool:
    try:
        return bool(stream.is_capturing())
    except RuntimeError:
        return False


def leave_a_gpu_that_is_behind_alone(comm: Any) -> None:
    """Checking a launch costs as much as launching it: a call checks an earlier one only now and then."""
    from gradsync.communicators.nccl.launch import Launch

    array, side, mine = full(0), side_stream(), threading.get_ident()
    for _ in range(6):
        comm.all_reduce(array, stream=side)
    looks, done = 0, Launch.done

    def counted(launch: Any) -> bool:
        nonlocal looks
        looks += threading.get_ident() == mine
        return done(launch)

    Launch.done = counted  # type: ignore[method-assign]
    with held_up(side):
        for _ in range(300):
            comm.all_reduce(array, stream=side)
    Launch.done = done  # type: ignore[method-assign]
    assert looks < 20
    bring_to_rest(comm)
    wait_until(lambda: not comm._backend._watched._running)  # and nothing is kept for long


def count_calls_of_a_steady_step(comm: Any) -> dict[str, int]:
    """Returns the calls of a step that repeats the steps before, with four buckets."""
    from gradsync import process_group

    client: Any = process_group._client
    calls = CountingModule.calls = Calls()
    cupy.RawModule = CountingModule
    calls.watch(client, "set", "get", "exchange", "left_ranks", "barrier")
    if IS_STAND_IN:  # CuPy's own classes cannot be changed
        calls.watch(cupy.cuda.Event, "synchronize")
        calls.watch(cupy.cuda.Stream, "synchronize")
        calls.watch(cupy.cuda.MemoryPool, "malloc")
        calls.watch(cupy.ndarray, "get")
        calls.watch(cupy.cuda.runtime, "streamSynchronize", "deviceSynchronize")
    backend = connect(client, process_group._settings._replace(allow_shared_gpu=True), "counted")
    with Communicator(backend) as counted:
        calls.watch(counted._backend._nccl, "call")
        callback = gs.AllreduceCallback("mean", counted, threshold_bytes=2 * 4 * SIZE)
        gradients = [full(comm.rank) for _ in range(8)]
        for step in range(5):
            bring_to_rest(comm)
            comm.barrier()
            calls.counting = step == 4
            with callback.backward():
                futures = [callback(index, gradient) for index, gradient in enumerate(gradients)]
            for future in futures:
                future.result()
            calls.counting = False
        assert_all(gradients[-1], total(comm, 0) / comm.world_size)
    return calls.counts
