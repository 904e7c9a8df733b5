"""NCCL and streams: whatever the delays, nothing is read before it is written, and no call makes the host wait."""

from types import SimpleNamespace

import numpy as np
import pytest

import gradsync as gs
from backends.on_cuda import HANGS, SIZE, assert_all, full, hear, meet, side_stream, tell, total
from obstacle import Obstacle

# Pauses on each stream, and work that an obstacle holds up until the host has made all its calls.
DELAYS = {"FAKE_CUPY_DELAY_MS": "1"}
slow_streams = pytest.mark.ranks(on={"fake": (2,), "gpu": (1, 2)}, environment=DELAYS)

ROWS = 600


def collectives(comm, source):
    """Collectives of a source of ROWS elements that are the rank + 1, with the values of the result's blocks."""
    import cupy

    n, rank = comm.world_size, comm.rank
    last, after, before = n - 1, (rank + 1) % n, (rank - 1) % n
    sizes = [ROWS - 10 * (n - 1)] + [10] * (n - 1)
    values = [peer + 1.0 for peer in range(n)]
    room = cupy.empty(ROWS, np.float32)
    return {
        "all_reduce": (lambda **o: comm.all_reduce(source, **o), [sum(values)]),
        "reduce": (lambda **o: comm.reduce(source, "sum", last, **o), [sum(values)] if rank == last else []),
        "reduce_scatter": (lambda **o: comm.reduce_scatter(source, **o), [sum(values)]),
        "uneven reduce_scatter": (lambda **o: comm.reduce_scatter(source, sizes=sizes, **o), [sum(values)]),
        "broadcast": (lambda **o: comm.broadcast(source, last, **o), [last + 1.0]),
        "all_gather": (lambda **o: comm.all_gather(source, **o), values),
        "gather": (lambda **o: comm.gather(source, last, **o), values if rank == last else []),
        "scatter": (lambda **o: comm.scatter(source, last, out=room[: ROWS // n], **o), [last + 1.0]),
        "all_to_all": (lambda **o: comm.all_to_all(source, **o), values),
        "exchange": (lambda **o: comm.exchange(source, dest=after, out=room, source=before, **o), [before + 1.0]),
        "uneven all_to_all": (
            lambda **o: comm.all_to_all(source, send_sizes=sizes, recv_sizes=[sizes[rank]] * n, **o),
            values,
        ),
    }


@pytest.mark.ranks(on={"fake": (1, 3), "gpu": (1, 2)}, environment=DELAYS)
def test_every_collective_reads_its_source_when_its_stream_has_made_it(comm):
    comm.barrier()
    for name in collectives(comm, None):
        source, side = full(0, ROWS), side_stream()
        collective, values = collectives(comm, source)[name]
        # The first messages between ranks, and the comparison of sizes, wait for the device.
        obstacle = Obstacle(side)
        if "uneven" in name:
            obstacle.lift()
        with obstacle:
            with side:
                source += comm.rank + 1
            result = collective(stream=side)
        got = [] if result is None else list(dict.fromkeys(result.get(stream=side).tolist()))
        assert got == list(dict.fromkeys(values)), name


@slow_streams
def test_a_collective_runs_on_whichever_stream_it_is_given(comm):
    """As CuPy's, as a handle, by CUDA's stream protocol, as PyTorch's; and the next one waits for it."""
    ways = [
        lambda stream: stream,
        lambda stream: stream.ptr,
        lambda stream: SimpleNamespace(__cuda_stream__=lambda: (0, stream.ptr)),
        lambda stream: SimpleNamespace(cuda_stream=stream.ptr),
    ]
    comm.barrier()
    for given in ways:
        reduced, sent, after, side = full(3), full(3), full(0), side_stream()
        with Obstacle(side):
            with side:
                reduced += comm.rank
                sent += comm.rank
            comm.all_reduce(reduced, stream=given(side))
            comm.broadcast(sent, comm.world_size - 1, stream=given(side))
            comm.all_reduce(after)
        assert_all(reduced, total(comm, 3), side)
        assert_all(sent, comm.world_size - 1 + 3, side)
        assert_all(after, 0)


@pytest.mark.ranks(on={"fake": (2,), "gpu": (2,)}, environment={"CUPY_CUDA_PER_THREAD_DEFAULT_STREAM": "1", **DELAYS})
def test_default_streams_of_each_thread(comm):
    import cupy

    comm.barrier()
    stream, array = cupy.cuda.get_current_stream(), full(comm.rank)
    assert stream.ptr == cupy.cuda.Stream.ptds.ptr
    callback = gs.AllreduceCallback("sum", comm)
    callback.flush()  # the ranks compare the callback, which waits for the device
    with Obstacle(stream):
        array += 1
        comm.all_reduce(array)
        future = callback("w", array)
        callback.flush()
        result = future.result()
    assert_all(result, comm.world_size * total(comm, 1))


@pytest.mark.ranks(on={"fake": (2,), "gpu": (1, 2)})
def test_so_do_threads_one_of_which_gets_the_number_of_one_that_has_ended(comm):
    import threading

    import cupy

    callback = gs.AllreduceCallback("sum", comm)
    callback.flush()
    gradients, numbers, obstacles = [full(0), full(0)], [], []
    device, own, side = cupy.cuda.Device(), cupy.cuda.Stream.ptds, side_stream()
    ready = side.record()

    def hand_over():
        index = len(numbers)
        if index == 2 or (index == 1 and threading.get_ident() != numbers[0]):
            return
        numbers.append(threading.get_ident())
        with device, own:
            own.wait_event(ready)
            if index == 0:
                obstacles.append(Obstacle(own))
            gradients[index] += comm.rank + index
            callback(index, gradients[index])

    for _ in range(100):
        thread = threading.Thread(target=hand_over)
        thread.start()
        thread.join()
    if len(numbers) == 1:
        callback(1, gradients[1] + comm.rank + 1)
    with side:
        callback.flush()
        obstacles[0].lift()
    for index, gradient in enumerate(gradients[: len(numbers)]):
        assert_all(gradient, total(comm, index), side)


@slow_streams
def test_a_callback_reduces_what_several_streams_make(comm):
    for threshold_bytes in (1, 2 * 4 * SIZE, 10**7):
        callback = gs.AllreduceCallback("sum", comm, threshold_bytes=threshold_bytes)
        callback.flush()  # the ranks compare the callback, which waits for the device
        for number_of_streams in (1, 3, 4):
            gradients = [full(0) for _ in range(4)]
            streams = [side_stream() for _ in range(number_of_streams)]
            obstacles = [Obstacle(stream) for stream in streams]
            for index, gradient in enumerate(gradients):
                with streams[index % number_of_streams]:
                    gradient += comm.rank + index
                    callback(index, gradient)
            callback.flush()
            for obstacle in obstacles:
                obstacle.lift()
            for index, gradient in enumerate(gradients):
                assert_all(gradient, total(comm, index))


@slow_streams
def test_a_step_and_its_results_never_make_the_host_wait(comm):
    """Also where the gradients come again, or live in buckets."""
    shapes = dict.fromkeys(range(4), ((SIZE // 50, 50), np.float32))
    for parameters in (None, shapes):
        callback = gs.AllreduceCallback(
            "mean", comm, threshold_bytes=2 * 4 * SIZE, parameters=parameters, gradient_as_bucket_view=bool(parameters)
        )
        for step in range(4):
            producer = side_stream()
            obstacle = Obstacle(producer)
            with producer:
                made = [full(comm.rank + index + step).reshape(SIZE // 50, 50) for index in range(4)]
            if step == 0:
                obstacle.lift()  # ranks meet for the first time
            with producer, callback.backward():
                futures = [callback(index, gradient) for index, gradient in enumerate(made)]
            with producer:
                results = [future.result() for future in futures]
                if obstacle.holds and step:
                    assert not any(future.done() for future in futures)
            obstacle.lift()
            for index, result in enumerate(results):
                assert_all(result, total(comm, index + step) / comm.world_size, producer)


@slow_streams
def test_a_future_orders_the_stream_that_uses_the_result(comm):
    ways = {
        "result": lambda future, _: future.result(),
        "wait": lambda future, _: future.wait(),
        "wait of a stream": lambda future, consumer: future.wait(consumer),
        "wait of a handle": lambda future, consumer: future.wait(consumer.ptr),
    }
    callback = gs.AllreduceCallback("sum", comm)
    callback.flush()  # the ranks compare the callback, which waits for the device
    for name, order in ways.items():
        gradient, copy, producer, consumer = full(0), full(0), side_stream(), side_stream()
        with Obstacle(producer):
            with producer:
                gradient += comm.rank
                future = callback("w", gradient)
                callback.flush()  # orders the producer's stream, which is not the consumer's
            if " of " in name:
                order(future, consumer)  # while another stream is current
            with consumer:
                if " of " not in name:
                    order(future, consumer)
                copy += gradient
        assert_all(copy, total(comm, 0), consumer)


@pytest.mark.ranks(on={"fake": (1, 2), "gpu": (1, 2)}, environment=DELAYS)
def test_what_is_no_stream_of_this_gpu_is_refused_and_the_others_go_on(comm):
    import cupy

    array = full(comm.rank)
    if comm.rank == 0:
        wrong = ["x", 1.5, object(), True, array]
        if cupy.cuda.runtime.getDeviceCount() > 1:
            with cupy.cuda.Device(1):
                wrong.append(cupy.cuda.Stream(non_blocking=True))
        for stream in wrong:
            for collectives_ in (comm, comm.asynchronous):
                with pytest.raises(gs.InvalidArgument):
                    collectives_.all_reduce(array, stream=stream)
    future = comm.asynchronous.all_reduce(array)
    with pytest.raises(gs.InvalidArgument):
        future.wait("x")
    assert_all(future.result(), total(comm, 0))


@pytest.mark.ranks(on={"fake": (2,), "gpu": (2,)}, environment=DELAYS)
@pytest.mark.parametrize("waited_for", [False, True], ids=["own graph", "graph that the null stream waits for"])
def test_a_stream_that_captures_a_graph_is_refused_and_spoils_neither_graph_nor_step(comm, waited_for):
    import cupy

    array, out, first, second = full(comm.rank), full(0), full(comm.rank), full(comm.rank)
    callback = gs.AllreduceCallback("sum", comm)
    for step in range(3):  # gradients that are new, and that come again
        callback(1, first)
        if comm.rank == 0:
            graph_stream = cupy.cuda.Stream(non_blocking=not waited_for)
            other = cupy.cuda.Stream(non_blocking=True)
            cupy.cuda.Device().synchronize()
            refused = [
                lambda: comm.all_reduce(array),
                lambda: comm.all_reduce(array, stream=other),
                lambda: comm.asynchronous.all_reduce(array, stream=other),
                comm.barrier,
                lambda: gs.bcast_list_([array], communicator=comm),
                lambda: gs.average_gradients({"a": array}, communicator=comm),
                lambda: callback(2, second),
                callback.flush,
            ]
            graph_stream.begin_capture()
            for stream in (graph_stream, graph_stream.ptr):
                with pytest.raises(gs.InvalidArgument):
                    comm.all_reduce(array, stream=stream)
            with cupy.cuda.Stream.null if waited_for else graph_stream:
                for call in refused:
                    with pytest.raises(gs.InvalidArgument):
                        call()
            with graph_stream:
                cupy.add(array, 1, out=out)
            graph_stream.end_capture().launch(graph_stream)
            assert_all(out, array.get()[0] + 1, graph_stream)
        callback(2, second)
        callback.flush()
        comm.all_reduce(array)
        for reduced in (array, first, second):
            assert_all(reduced, total(comm, 0) * comm.world_size**step)


@pytest.mark.ranks(on={"fake": (2,)}, environment=DELAYS)
def test_a_capture_that_forbids_all_threads_to_look_is_no_failed_gpu(comm):
    """In CUDA's global mode, which is PyTorch's, questions of gradsync's threads spoil a capture."""
    import cupy

    comm.barrier()
    array, producer = full(0), side_stream()
    with Obstacle(producer):
        with producer:
            array += comm.rank
            future = comm.asynchronous.all_reduce(array)
        graph_stream = cupy.cuda.Stream(non_blocking=True)
        graph_stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        future.done()
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
            graph_stream.end_capture()
    assert_all(future.result(), total(comm, 0))
    comm.all_reduce(array)


@pytest.mark.ranks(on={"fake": (3,), "gpu": (2,)}, environment=HANGS)
def test_groups_with_common_members_run_in_the_order_of_the_calls(comm):
    """On many streams; two collectives that started crosswise on two GPUs would hang."""
    pairs = [(low, high) for high in range(comm.world_size) for low in range(high)]
    groups = {pair: comm.new_group(pair) for pair in pairs}
    for step in range(6):
        arrays = []
        for pair in pairs if step % 2 else pairs[::-1]:
            if comm.rank in pair:
                array, side = full(comm.rank + step), side_stream()
                if step == 1:
                    with Obstacle(side):
                        groups[pair].all_reduce(array, stream=side)
                else:
                    groups[pair].asynchronous.all_reduce(array)
                arrays.append((array, sum(pair) + 2 * step))
        comm.barrier()
        for array, wanted in arrays:
            assert_all(array, wanted)
    for group in groups.values():
        if group:
            group.close()


@pytest.mark.ranks(2, on=("fake", "gpu"), environment=HANGS, fresh=True)
def test_a_message_is_launched_before_the_collective_of_a_group_that_the_ranks_agreed_on_later(comm, tmp_path):
    """Else it would wait for the collective on one GPU, and the collective for it on the other."""
    group = comm.new_group([0, 1])
    group.barrier()
    comm.send(full(0), 1) if comm.rank == 0 else comm.recv(full(0), 0)  # the first contact blocks the host
    if comm.rank == 0:
        future = comm.asynchronous.send(full(5), 1)
        future.done()  # begins it
        tell(tmp_path, "rank 0 has begun it")
        hear(tmp_path, "rank 1 has launched it")
        assert_all(group.all_reduce(full(1)), 2)
        future.result()
    else:
        hear(tmp_path, "rank 0 has begun it")
        room = comm.recv(full(0), 0)
        tell(tmp_path, "rank 1 has launched it")
        assert_all(group.all_reduce(full(1)), 2)
        assert_all(room, 5)


@pytest.mark.ranks(on={"fake": (2,), "gpu": (2,)}, environment=HANGS)
@pytest.mark.parametrize("threads", [False, True], ids=["one thread", "default streams of two threads"])
def test_what_is_launched_later_waits_though_it_is_ready(comm, tmp_path, threads):
    from threading import Thread

    import cupy

    first, second = comm.new_group(range(comm.world_size)), comm.new_group(range(comm.world_size))
    for group in (first, second):
        group.barrier()
    own = cupy.cuda.Stream.ptds if threads else cupy.cuda.Stream(non_blocking=True)
    early, late, futures, device = full(1), full(1), [], cupy.cuda.Device()
    own.wait_event(cupy.cuda.Stream.null.record())

    def launch():
        with device, own:  # a thread begins on the first device
            futures.append(second.asynchronous.all_reduce(late, stream=own))

    with own:  # the null stream would wait for what holds this one up
        with Obstacle(own) as obstacle:
            first.all_reduce(early, stream=own)
            if threads:
                thread = Thread(target=launch)
                thread.start()
                thread.join()
            else:
                futures.append(second.asynchronous.all_reduce(late))
            meet(tmp_path, comm, "all ranks have launched both")
            assert not (futures[0].done() and obstacle.holds)
        assert_all(futures[0].result(), comm.world_size)
        assert_all(early, comm.world_size, own)
    for group in (first, second):
        group.close()


@pytest.mark.ranks(on={"fake": (1,), "gpu": (1,)}, environment=HANGS)
def test_each_thread_with_its_own_default_stream_waits_for_a_result(comm):
    from threading import Thread

    import cupy

    own, device, copies = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Device(), []
    array = full(2)
    own.wait_event(cupy.cuda.Stream.null.record())

    def read(future):
        with device, cupy.cuda.Stream.ptds:
            copies.append(future.result() + 1)

    with Obstacle(own):
        with own:
            array *= 2
            future = comm.asynchronous.all_reduce(array, stream=own)
        for _ in range(2):  # the second thread has the number of the first
            thread = Thread(target=read, args=(future,))
            thread.start()
            thread.join()
    cupy.cuda.Device().synchronize()
    for copy in copies:
        assert_all(copy, 5)


@pytest.mark.ranks(on={"fake": (2,)})
def test_a_message_is_not_over_for_another_thread_before_its_end_can_be_waited_for(comm):
    """An event that was never recorded counts as reached."""
    from threading import Thread

    from gradsync.communicators.nccl.work import GpuWork

    room, seen, record_end = np.zeros(SIZE, np.float32), [], GpuWork.record_end
    if comm.rank == 0:
        comm.send(full(5), 1)
        return
    future = comm.asynchronous.recv(room, 0)

    def asked_meanwhile(work):
        thread = Thread(target=lambda: seen.append(future.done()))
        thread.start()
        thread.join()
        record_end(work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GpuWork, "record_end", asked_meanwhile)
        assert_all(future.result(), 5)
    assert seen == [False]
