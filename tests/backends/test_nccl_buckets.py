"""Buckets over NCCL: with `parameters=` each is launched as soon as it and all before it are complete."""

import threading

import numpy as np
import pytest

import gradsync as gs
from backends.on_cuda import HANGS, SIZE, assert_all, full, side_stream, total
from obstacle import Obstacle

DELAYS = {"FAKE_CUPY_DELAY_MS": "1"}
two = pytest.mark.ranks(on={"fake": (2,), "gpu": (2,)}, environment=DELAYS)
NAMES = "abcdef"
SHAPES = dict.fromkeys(NAMES, ((SIZE,), "float32"))


def in_pairs(comm, names=NAMES, **options):
    """A callback of which two gradients fill a bucket."""
    shapes = {name: SHAPES[name] for name in names}
    return gs.AllreduceCallback("sum", comm, threshold_bytes=8 * SIZE, parameters=shapes, **options)


def step(callback, comm, names=NAMES):
    """Hands over gradients whose sums are what `check` looks for."""
    with callback.backward():
        return {name: callback(name, full(comm.rank + NAMES.index(name))) for name in names}


def check(futures, comm):
    for name, future in futures.items():
        assert_all(future.result(), total(comm, NAMES.index(name)))


@pytest.mark.ranks(on={"fake": (1, 2)})
def test_gradients_that_come_to_share_memory_are_refused(comm):
    import cupy

    memory, places = cupy.zeros(50, np.float32), {"a": (0, 10), "b": (10, 20), "c": (20, 30)}
    callback = gs.AllreduceCallback("sum", comm, parameters=dict.fromkeys(places, ((10,), "float32")))
    steps = [
        ("", {}),
        ("b", {"b": (5, 15)}),
        ("c", {"c": (15, 25)}),
        ("", {"a": (40, 50)}),
        ("b", {"a": (40, 50), "b": (40, 50)}),
    ]
    for refused, moved in steps:
        memory[...] = 1.0
        futures = {}
        for name, (begin, end) in (places | moved).items():
            if name == refused:
                with pytest.raises(gs.InvalidArgument):
                    callback(name, memory[begin:end])
                begin, end = (30, 40)
            futures[name] = callback(name, memory[begin:end])
        callback.flush()
        for future in futures.values():
            assert_all(future.result(), comm.world_size)


# -- Early launches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("views", [False, True])
@two
def test_complete_buckets_are_launched_in_the_order_of_parameters_whatever_the_order_of_hand_over(comm, views):
    """And none before the flush where the parameters are not known."""
    for order in ("abcdef", "fedcba", "badcfe"):
        mine = order if comm.rank == 0 else order[::-1]
        callback, launched = in_pairs(comm, gradient_as_bucket_view=views), []
        with callback.backward():
            futures = {}
            for name in mine:
                futures[name] = callback(name, full(comm.rank + NAMES.index(name)))
                launched.append(callback.statistics.all_reduces)
                with pytest.raises(gs.FutureNotReady):
                    futures[name].result()
        arrived = [set(mine[: number + 1]) for number in range(len(mine))]
        complete = [next((i for i in range(3) if not set("abcdef"[2 * i : 2 * i + 2]) <= have), 3) for have in arrived]
        assert launched == complete
        check(futures, comm)
        unknown = gs.AllreduceCallback("sum", comm, threshold_bytes=1)
        unknown("a", full(comm.rank))
        assert unknown.statistics.all_reduces == 0
        unknown.flush()
        del callback, unknown


@two
def test_a_bucket_waits_for_all_streams_that_make_its_gradients(comm):
    callback = in_pairs(comm)
    callback.flush()
    for _ in range(2):
        streams = [side_stream() for _ in NAMES]
        obstacles = [Obstacle(stream) for stream in streams]
        futures = {}
        for name, stream in zip(NAMES, streams, strict=True):
            with stream:
                gradient = full(NAMES.index(name))
                gradient += comm.rank
                futures[name] = callback(name, gradient)
        callback.flush()
        for obstacle in obstacles[::-1]:
            obstacle.lift()
        check(futures, comm)


@two
def test_zeros_stand_for_what_is_missing_after_launches(comm):
    callback = in_pairs(comm, missing="zero")
    for lacking in ("b", "d", "f", NAMES):
        names = "".join(name for name in NAMES if name not in lacking) if comm.rank == 1 else NAMES
        step(callback, comm, names)
        for name, result in callback.results().items():
            at = NAMES.index(name)
            assert_all(result, at if name in lacking else total(comm, at))


@pytest.mark.ranks(2, on=("fake",), fresh=True, environment=HANGS)
@pytest.mark.parametrize("on_host", [False, True])
def test_an_exception_after_launches_reaches_the_other_rank(comm, on_host):
    """Though its bucket never ends, since rank 1 does not come to it."""

    def gradient():
        return np.ones(SIZE, np.float32) if on_host else full(1)

    callback = in_pairs(comm)
    check(step(callback, comm), comm)
    comm.barrier()  # else rank 1 may fail while rank 0 still reads these results
    if comm.rank == 1:
        with pytest.raises(KeyError), callback.backward():
            callback("a", gradient())
            raise KeyError("no such batch")
    else:
        with pytest.raises(gs.RankFailed, match="no such batch") as raised:
            with callback.backward():
                futures = [callback(name, gradient()) for name in NAMES]
            futures[0].numpy()
        assert raised.value.rank == 1


@pytest.mark.ranks(on={"fake": (2,), "gpu": (2,)}, fresh=True, environment=DELAYS)
def test_two_callbacks_with_launches_are_right_in_one_order_and_told_in_two(comm):
    first, second = in_pairs(comm, "abcd", name="first"), in_pairs(comm, "abcd", name="second")

    def steps(calls):
        futures = ({}, {})
        with first.backward(), second.backward():
            for which, name in calls:
                futures[which][name] = (first, second)[which](name, full(comm.rank + NAMES.index(name)))
        return futures

    crossed = [(which, name) for name in "abcd" for which in (0, 1)]
    for of_first, of_second in (steps(crossed), steps(crossed[::-1])):
        check(of_first, comm)
        check(of_second, comm)
    with pytest.raises(gs.PlanMismatch) as raised:
        steps(crossed if comm.rank == 0 else sorted(crossed)[::-1])[0]["a"].numpy()
    assert raised.value.broken


@two
def test_gradients_that_share_memory_are_refused_where_they_are_handed_over(comm):
    callback, memory = in_pairs(comm), full(comm.rank, SIZE + 1)
    callback("a", memory[:SIZE])
    with pytest.raises(gs.InvalidArgument, match="shares memory"):
        callback("b", memory[1:])
    futures = {name: callback(name, full(comm.rank + NAMES.index(name))) for name in "bcdef"}
    callback.flush()
    check(futures, comm)
    assert_all(memory[:SIZE], total(comm, 0))


# -- Where results go --------------------------------------------------------------------------------------------------


def layouts(comm):
    """Gradients that are not reduced where they lie; all elements are the rank + 1."""
    import cupy

    on_host = np.full((60, 40), comm.rank + 1, np.float32)
    fixed = on_host.copy()
    fixed.setflags(write=False)
    on_device = cupy.asarray(on_host)
    return {
        "host": on_host,
        "host, read-only": fixed,
        "host, every other row": np.repeat(on_host, 2, 0)[::2],
        "host, broadcast": np.broadcast_to(np.float32(comm.rank + 1), (60, 40)),
        "device, transposed": cupy.asarray(on_host.T).T,
        "device, every other row": cupy.full((120, 40), comm.rank + 1, np.float32)[::2],
        "device, broadcast": cupy.broadcast_to(cupy.asarray(np.float32(comm.rank + 1)), (60, 40)),
        "device": on_device,
    }


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1e9}, {"hook": True}, {"threshold_bytes": 1}], ids=str)
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.ranks(on={"fake": (1, 2), "gpu": (1, 2)}, environment=DELAYS)
def test_gradients_of_every_layout_on_host_and_device(comm, known, options):
    options = dict(options)
    has_hook = options.pop("hook", False)
    shapes = dict.fromkeys(layouts(comm), ((60, 40), "float32")) if known else None
    callback = gs.AllreduceCallback("sum", comm, parameters=shapes, **options)
    if has_hook:
        callback.register_hook(lambda bucket: bucket.communicator.all_reduce(bucket.buffer, bucket.op))
    for _ in range(2):
        given = layouts(comm)
        producer = side_stream()
        with Obstacle(producer) as obstacle:
            with producer:
                for name, gradient in given.items():
                    if name.startswith("device") and "broadcast" not in name:
                        gradient *= 2
                        gradient /= 2
                if known:  # a launch copies from the host, and to it, and may make it wait
                    obstacle.lift()
                futures = {name: callback(name, gradient) for name, gradient in given.items()}
            obstacle.lift()
            callback.flush()
        for name, future in futures.items():
            result = future.result()
            assert type(result) is type(given[name]), name
            assert_all(result, total(comm, 1))
            is_fresh = "read-only" in name or "broadcast" in name
            assert (result is given[name]) != is_fresh, name
            if is_fresh:
                assert_all(given[name], comm.rank + 1)
            assert callback.results()[name] is result


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.ranks(on={"fake": (1, 2), "gpu": (1, 2)})
def test_new_numpy_gradients_step_after_step(comm, known):
    """On the CPU those of later steps have a shorter way."""
    sync = gs.AllreduceCallback("sum", comm, parameters={"w": ((SIZE,), "float32")} if known else None)
    for number in range(10):
        gradient = np.full(SIZE, comm.rank + number, np.float32)
        with sync.backward():
            future = sync("w", gradient)
        assert future.result() is gradient
        assert (gradient == total(comm, number)).all()


@pytest.mark.parametrize("how", ["clips", "hook"])
@two
def test_a_stream_that_takes_a_result_waits_for_what_is_done_after_the_reduction(comm, how):
    """Clipping, and a hook, run on the stream of the flush, which lags behind."""
    import cupy

    callback = gs.AllreduceCallback("sum", comm, clip_norm=1.0 if how == "clips" else None, name=how)
    obstacles, multiply = [], cupy.multiply

    def late(*arguments, **options):
        if arguments[0] is gradient:  # not the squares of its parts
            obstacles.append(Obstacle(cupy.cuda.get_current_stream()))
        return multiply(*arguments, **options)

    def hook(bucket):
        obstacles.append(Obstacle(cupy.cuda.get_current_stream()))
        bucket.buffer[...] = 5

    if how == "hook":
        callback.register_hook(hook)
    producer, consumers = side_stream(), [side_stream() for _ in range(2)]
    with producer:
        gradient = full(2.0)
        cupy.multiply = late
        try:
            with callback.backward():
                future = callback("w", gradient)
        finally:
            cupy.multiply = multiply
    copies = []
    for consumer, take in zip(consumers, (future.result, lambda: callback.results()["w"]), strict=True):
        with consumer:
            copies.append(cupy.zeros(SIZE, np.float32))
            copies[-1] += take()
    assert obstacles
    for obstacle in obstacles:
        obstacle.lift()
    wanted = 5 if how == "hook" else 1 / SIZE**0.5
    for copy, consumer in zip(copies, consumers, strict=True):
        np.testing.assert_allclose(copy.get(stream=consumer), wanted, rtol=1e-5)


# -- Weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.ranks(on={"fake": (2, 3), "gpu": (2,)}, environment=DELAYS)
def test_weighted_means(comm, known):
    shapes = SHAPES if known else None
    callback = gs.AllreduceCallback("mean", comm, threshold_bytes=8 * SIZE, parameters=shapes)
    callback.flush()
    for weights in ([1, 3, 2], [2, 2, 2], [0, 1, 5], [4, 0, 0], [0, 0, 0]):
        mine = weights[comm.rank]
        producer = side_stream()
        with Obstacle(producer) as obstacle:
            with producer:
                gradients = {name: full(0) for name in NAMES}
                for name, gradient in gradients.items():
                    gradient += NAMES.index(name) + comm.rank if mine else np.nan
            obstacle.lift()
            with producer, callback.backward(weight=mine):
                for name, gradient in gradients.items():
                    callback(name, gradient)
        weights = weights[: comm.world_size]
        assert callback.total_weight == sum(weights)
        if sum(weights):
            mean = sum(weight * rank for rank, weight in enumerate(weights)) / sum(weights)
            for name, result in callback.results().items():
                np.testing.assert_allclose(result.get(), NAMES.index(name) + mean, rtol=1e-6)


# -- Steps on several streams ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hands_over", [NAMES, "a"])
@two
def test_the_memory_of_buckets_is_written_when_the_last_step_is_done_with_it(comm, hands_over):
    """Though this step is on another stream."""
    callback = in_pairs(comm, gradient_as_bucket_view=True, missing="zero")
    step(callback, comm)
    for _ in range(2):
        first, second = side_stream(), side_stream()
        with Obstacle(first) as obstacle:
            with first:
                step(callback, comm)
            threading.Timer(0.1, obstacle.lift).start()  # before it launches, the next step awaits the end of this one
            with second:
                step(callback, comm, hands_over)
        for name, result in callback.results().items():
            wanted = total(comm, NAMES.index(name)) if name in hands_over else 0
            assert_all(result, wanted, second)
