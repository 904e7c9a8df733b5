"""What the collectives, messages and groups of the NCCL communicator must do beyond the contract: run inside ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np
from nccl_checks import SECONDS, Calls, assert_all, full, held_up, side_stream
from nccl_failure_checks import client, wait_until_told

import gradsync as gs
from contract import contribution, dtype_of, expect
from kits import bring_to_rest

ROWS = 600


def ranks_of(comm: Any) -> range:
    return range(comm.world_size)


def total(comm: Any, value: float) -> float:
    """The sum over the ranks of rank + value."""
    return sum(rank + value for rank in ranks_of(comm))


# -- Streams and memory -----------------------------------------------------------------------------------------------


def collectives_of(comm: Any, source: Any) -> dict[str, tuple[Callable[..., Any], list[float]]]:
    """Collectives on a source of ROWS rows that hold the rank + 1, with the values that the result's blocks have."""
    n, rank = comm.world_size, comm.rank
    last = n - 1
    after, before = (rank + 1) % n, (rank - 1) % n
    sizes = [ROWS - 10 * (n - 1)] + [10] * (n - 1)  # of the rows of a source
    values = [peer + 1.0 for peer in ranks_of(comm)]
    everything = sum(values)

    def room() -> Any:
        return cupy.empty(ROWS, np.float32)

    return {
        "all_reduce": (lambda **o: comm.all_reduce(source, **o), [everything]),
        "reduce": (lambda **o: comm.reduce(source, "sum", last, **o), [everything] if rank == last else []),
        "reduce_scatter": (lambda **o: comm.reduce_scatter(source, **o), [everything]),
        "uneven reduce_scatter": (lambda **o: comm.reduce_scatter(source, sizes=sizes, **o), [everything]),
        "broadcast": (lambda **o: comm.broadcast(source, last, **o), [last + 1.0]),
        "all_gather": (lambda **o: comm.all_gather(source, **o), values),
        "gather": (lambda **o: comm.gather(source, last, **o), values if rank == last else []),
        "scatter": (lambda **o: comm.scatter(source, last, out=cupy.empty(ROWS // n, np.float32), **o), [last + 1.0]),
        "all_to_all": (lambda **o: comm.all_to_all(source, **o), values),
        "uneven all_to_all": (
            lambda **o: comm.all_to_all(source, send_sizes=sizes, recv_sizes=[sizes[rank]] * n, **o),
            values,
        ),
        "exchange": (lambda **o: comm.exchange(source, dest=after, out=room(), source=before, **o), [before + 1.0]),
    }


def assert_blocks(result: Any, values: list[float], stream: Any) -> None:
    """Each value fills a block of the result, whatever their sizes."""
    if not values:
        assert result is None
        return
    got = result.get(stream=stream)
    assert list(dict.fromkeys(got.tolist())) == list(dict.fromkeys(values)), f"{got[:3]} ... for {values}"


def follow_slow_streams(comm: Any) -> None:
    """Every collective reads its source when the stream that makes it has come there, and no sooner."""
    for name in collectives_of(comm, None):
        source, side = full(0, ROWS), side_stream()
        # The comparison of sizes waits for the device; only what comes before it may be held up.
        obstacles = [] if name == "uneven all_to_all" else [side]
        with held_up(*obstacles):
            with side:
                source += comm.rank + 1
            collective, values = collectives_of(comm, source)[name]
            result = collective(stream=side)
        assert_blocks(result, values, side)


def drop_results_at_once(comm: Any) -> None:
    """The result of a future that the caller drops, while its stream still reads it, is not written over."""
    callback = gs.AllreduceCallback("sum", comm)
    callback.flush()  # its first use, in which the ranks meet, waits for the device
    for step in range(3):
        own = side_stream()
        with own:
            copy = cupy.zeros(ROWS, np.float32)
            future = comm.asynchronous.all_gather(full(comm.rank + step, ROWS // comm.world_size))
            comm._backend._stream.synchronize()
            assert future.done()
            result = future.result()
            callback("needs as much memory on its way", cupy.ones(ROWS, np.int16))
            with held_up(own):
                copy += result
                del future, result
                callback.flush()
                comm._backend._stream.synchronize()
        assert sorted(set(copy.get(stream=own).tolist())) == [peer + step for peer in ranks_of(comm)]


def stage_both_ways(comm: Any) -> None:
    """A source or an `out` in host memory, with the other one on the device."""
    n, rank = comm.world_size, comm.rank
    on_device = cupy.full((n, 3), rank + 1, np.int16)
    for source in (on_device, on_device.get()):
        for make in (cupy.zeros, np.zeros):
            whole, part = make((n * n, 3), np.int16), make((1, 3), np.int16)
            comm.all_gather(source, out=whole)
            assert as_host(whole)[:, 0].tolist() == [peer + 1 for peer in ranks_of(comm) for _ in ranks_of(comm)]
            comm.reduce_scatter(source, out=part)
            assert as_host(part).tolist() == [[total(comm, 1)] * 3]
            comm.scatter(source if rank == 0 else None, out=part)
            assert as_host(part).tolist() == [[1] * 3]
            block = make((n, 3), np.int16)
            comm.all_to_all(source, out=block)
            assert as_host(block)[:, 0].tolist() == [peer + 1 for peer in ranks_of(comm)]
            comm.exchange(source, dest=(rank + 1) % n, out=block, source=(rank - 1) % n)
            assert (as_host(block) == (rank - 1) % n + 1).all()
        for collective in (comm.all_gather, lambda s: comm.reduce_scatter(s, "max")):
            assert type(collective(source)) is type(source)


def reuse_host_arrays_at_once(comm: Any) -> None:
    """A host array that a future is still to write to is read, and written to, in the order of the collectives."""
    n, slow = comm.world_size, side_stream()
    array, other = np.ones(ROWS), np.full(ROWS, 2.0)
    for step in range(3):
        with slow:
            futures = [comm.asynchronous.all_reduce(array) for _ in range(2)]
            futures.append(comm.asynchronous.all_reduce(other, "max", out=array))
        futures[-1].result()
        assert (array == 2 * n**step).all()
        assert (futures[0].result() == 2 * n**step).all()
        comm.all_reduce(other)
        comm.broadcast(array)
    memory = np.zeros((4, 6), np.int32)
    gs.bcast_list_([memory[:, ::2], memory[:, 1::2]], communicator=comm)  # one launch, and memory that interleaves
    callback = gs.AllreduceCallback("sum", comm)
    with callback.backward():
        for column in range(6):
            callback(column, memory[:, column])
    assert (memory == 0).all()


def as_host(array: Any) -> np.ndarray[Any, Any]:
    return array if isinstance(array, np.ndarray) else array.get()


def broadcast_in_one_go(comm: Any) -> None:
    """Arrays of any dtypes and layouts are one broadcast."""
    calls = Calls()
    calls.watch(comm._backend._nccl, "call")
    root = comm.world_size - 1
    shapes = [("float32", (30, 4)), ("int8", (3,)), ("complex128", ()), ("bool", (0,)), ("float16", (5, 5))]
    arrays = [cupy.full(shape, comm.rank + 1).astype(dtype) for dtype, shape in shapes]
    arrays += [cupy.asfortranarray(arrays[0]) * 2, np.full(7, comm.rank, np.int64)]
    calls.counting = True
    gs.bcast_list_(arrays, root, comm)
    calls.counting = False
    assert calls.counts == ({} if comm.world_size == 1 else {"call": 1})
    for array, value in zip(arrays, [root + 1] * 3 + [True, root + 1, 2 * root + 2, root], strict=True):
        assert (as_host(array) == value).all()


# -- Groups of calls --------------------------------------------------------------------------------------------------


def take_means_of_half_precision(comm: Any) -> None:
    """No mean is off to one side, as NCCL's own of bfloat16 is where the number of ranks is no power of two."""
    values = np.random.default_rng([5, comm.rank]).uniform(1, 2, (3 * comm.world_size, 1000))
    rows = slice(3 * comm.rank, 3 * comm.rank + 3)
    for name, side in (("bfloat16", 2e-4), ("float16", 4e-4)):
        dtype = dtype_of(name)
        mine = values.astype(dtype)
        given = [np.random.default_rng([5, rank]).uniform(1, 2, values.shape).astype(dtype) for rank in ranks_of(comm)]
        wanted = np.mean([each.astype(np.float64) for each in given], axis=0)
        results = {
            "all_reduce": (comm.all_reduce(cupy.asarray(mine), "mean"), wanted),
            "reduce_scatter": (comm.reduce_scatter(cupy.asarray(mine), "mean"), wanted[rows]),
            "uneven": (comm.reduce_scatter(cupy.asarray(mine), "mean", sizes=uneven(comm)), wanted[part_of(comm)]),
        }
        reduced = comm.reduce(cupy.asarray(mine), "mean", root=0)
        if comm.rank == 0:
            results["reduce"] = reduced, wanted
        for what, (result, right) in results.items():
            ratio = (result.get().astype(np.float64) / right).mean()
            assert abs(ratio - 1) < side, (name, what, ratio)


def round_means_of_half_precision_once(comm: Any) -> None:
    """Of sums that the dtype has, so that no hop of NCCL's rounds: what is wrong then is the mean alone."""
    for name, bits in (("float16", 11), ("bfloat16", 8)):
        dtype = dtype_of(name)
        drawn = [
            np.random.default_rng([6, rank]).integers(0, 2**bits // comm.world_size, 3000) for rank in ranks_of(comm)
        ]
        wanted = (sum(drawn) / comm.world_size).astype(dtype)
        source = cupy.asarray(drawn[comm.rank].astype(dtype))
        assert (comm.all_reduce(source, "mean", out=cupy.empty_like(source)).get() == wanted).all(), name
        reduced = comm.reduce(source, "mean", root=0, out=cupy.empty_like(source))
        if comm.rank == 0:
            assert (reduced.get() == wanted).all(), name
        assert (source.get() == drawn[comm.rank]).all()
        part = slice(comm.rank * 3000 // comm.world_size, (comm.rank + 1) * 3000 // comm.world_size)
        assert (comm.reduce_scatter(source, "mean").get() == wanted[part]).all(), name
        assert (comm.all_reduce(source, "mean").get() == wanted).all(), name
    assert (
        comm.all_reduce(cupy.full(5, 6e4, np.float16), "mean").get() == np.float16(6e4)
    ).all()  # their sum is too large


def judge_values(comm: Any) -> None:
    """Non-finite values and squares are found on the device as in float64 on the host, for each kind of dtype."""
    arrays = comm._backend.arrays
    for name in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int32", "bool"):
        for size in (0, 1, 5_000):
            values = contribution(comm.rank, (size,), name)
            squares = np.square(np.abs(values.astype(np.complex128))).sum()
            assert arrays.all_finite(cupy.asarray(values)).get()
            np.testing.assert_allclose(arrays.sum_of_squares(cupy.asarray(values)).get(), squares, rtol=1e-12)
            for bad in (np.nan, np.inf, -np.inf) if size and name not in ("int32", "bool") else ():
                values[size // 2] = bad
                assert not arrays.all_finite(cupy.asarray(values)).get()
    largest = cupy.full(1000, 65504, np.float16)
    assert arrays.sum_of_squares(largest).get() == 1000 * 65504.0**2


def uneven(comm: Any) -> list[int]:
    return [3 * comm.world_size - 2 * (comm.world_size - 1), *[2] * (comm.world_size - 1)]


def part_of(comm: Any) -> slice:
    sizes = uneven(comm)
    return slice(sum(sizes[: comm.rank]), sum(sizes[: comm.rank + 1]))


def leave_no_group_open(comm: Any) -> None:
    """Whatever ends a group of calls, the next one is launched; one that has been ended is told so."""
    handle, nccl = comm._backend._nccl, comm._backend._nccl.binding
    array = full(1, 4)

    def reduce(op: int = nccl.NCCL_SUM) -> None:
        handle.call("allReduce", array.data.ptr, array.data.ptr, 4, nccl.NCCL_FLOAT32, op)

    def fail(error: BaseException) -> None:
        with handle.group():
            raise error

    def call_wrongly() -> None:
        with handle.group():
            reduce(99)

    for error in (ZeroDivisionError(), KeyboardInterrupt(), SystemExit()):
        expect(type(error), lambda e=error: fail(e))
        expect(nccl.NcclError, nccl.groupEnd)  # there is none
    expect(gs.NcclError, call_wrongly, "ncclAllReduce")
    expect(nccl.NcclError, nccl.groupEnd)
    with handle.group():
        reduce()
    assert_all(array, comm.world_size)
    handle.abort()
    assert handle.has_ended.wait(SECONDS)
    expect(gs.CommunicatorClosed, lambda: fail(ZeroDivisionError()), "ended")
    expect(gs.CommunicatorClosed, reduce, "ended")
    expect(nccl.NcclError, nccl.groupEnd)


# -- Messages ---------------------------------------------------------------------------------------------------------


def meet_exchange_in_any_order(comm: Any) -> None:
    """An exchange goes together with plain messages on the other side, whichever of the two comes first there."""
    for arrays in (cupy, np):  # the host waits for each message of its own
        for step, order in enumerate([(0, 1), (1, 0)] * 4):
            size = 50 + (step if arrays is np else 0)  # the size changes
            mine, other = arrays.full(size, comm.rank + step), arrays.full(size, -1)
            plain = [lambda m=mine: comm.send(m, 0), lambda o=other: comm.recv(o, 0)]
            if comm.rank == 0:
                comm.exchange(mine, dest=1, out=other, source=1)
            elif comm.rank == 1:
                for index in order:
                    plain[index]()
            if comm.rank < 2:
                assert (as_host(other) == 1 - comm.rank + step).all()


def break_out_of_a_ring(comm: Any) -> None:
    """All exchange in a ring but one rank, which sends first and receives then; and one that comes late."""
    n, rank = comm.world_size, comm.rank
    after, before = (rank + 1) % n, (rank - 1) % n
    for step in range(2 * n):
        mine, other = full(rank + step, 10), full(-1, 10)
        if rank != step % n:
            with telling_of_launches(comm, f"rank {rank} launches in step {step}"):
                comm.exchange(mine, dest=after, out=other, source=before)
        elif step < n:
            for neighbour in (before, after):  # which go on without this rank's other message
                client().get(f"rank {neighbour} launches in step {step}", timeout_seconds=SECONDS)
            comm.exchange(mine, dest=after, out=other, source=before)
        else:
            comm.send(mine, after)
            comm.recv(other, before)
        assert_all(other, before + step)


@contextmanager
def telling_of_launches(comm: Any, key: str) -> Iterator[None]:
    """Tells the other ranks when this one is about to launch the first message on which it has agreed."""
    compare_messages = comm._backend._comparison.compare_messages

    def tell(agreements: Any) -> Iterator[Any]:
        for number, direction in enumerate(compare_messages(agreements)):
            if number == 0:
                client().set(key, b"")
            yield direction

    comm._backend._comparison.compare_messages = tell
    try:
        yield
    finally:
        del comm._backend._comparison.compare_messages


def agree_on_one_message_of_two(comm: Any) -> None:
    """The message on which its ranks agree is launched; the other one is a mismatch on both sides."""
    n, rank = comm.world_size, comm.rank
    after, before = (rank + 1) % n, (rank - 1) % n
    mine, other = full(rank, 10), full(-1, 9 if rank == 0 else 10)  # rank 0 expects another size
    errors = []
    try:
        comm.exchange(mine, dest=after, out=other, source=before)
    except gs.PlanMismatch as error:
        errors.append(error)
    assert len(errors) == (rank in (0, n - 1))
    for error in errors:
        assert set(error.descriptions) == {0, n - 1}
    assert_all(other, -1 if rank == 0 else before)
    comm.barrier()
    assert_all(comm.exchange(mine, dest=after, out=full(-1, 10), source=before), before)


def wait_for_a_message_in_vain(comm: Any, how: str) -> str:
    """Rank 1 never sends what rank 0 waits for; rank 2 has closed, and has no part in it."""
    if comm.rank == 2:
        comm.close()
    elif comm.rank == 1:
        if how == "closes":
            comm.close()
        kind = gs.CollectiveTimeout if how == "stays" else gs.RankFailed
        return wait_until_told(kind)
    else:
        error = expect(gs.RankFailed if how == "closes" else gs.CollectiveTimeout, lambda: comm.recv(full(0, 3), 1))
        if how == "closes":
            assert error.rank == 1
        else:
            assert error.missing_ranks == (1,)
        return str(error)
    return wait_until_told(gs.GradsyncError)


# -- Groups -----------------------------------------------------------------------------------------------------------


def split_beside_a_collective(comm: Any) -> None:
    """Into groups, right after a collective; rank 0 joins none the last time."""
    places: list[Callable[[int], tuple[int | None, int]]] = [
        lambda rank: (rank % 2, 0),
        lambda rank: (-(2**40) - rank // 2, -rank),
        lambda rank: (7 if rank else None, 0),
    ]
    for place in places:
        color, key = place(comm.rank)
        array = full(1, 3)
        comm.all_reduce(array)
        group = comm.split(color, key)
        assert_all(array, comm.world_size)
        if color is None:
            assert not group
            continue
        members = sorted([r for r in ranks_of(comm) if place(r)[0] == color], key=lambda r: (place(r)[1], r))
        assert group.ranks == tuple(members)
        assert group.all_gather(full(comm.rank, 1)).get().tolist() == members
        group.close()
        assert not comm.closed
    comm.barrier()


def take_turns_with_overlapping_groups(comm: Any) -> None:
    """Collectives of groups with common members, in one order and on many streams, run in that order."""
    pairs = [(low, high) for high in ranks_of(comm) for low in range(high)]
    groups = {pair: comm.new_group(pair) for pair in pairs}
    for step in range(20):
        arrays = []
        for pair in pairs if step % 2 else pairs[::-1]:
            if comm.rank in pair:
                array, side = full(comm.rank + step), side_stream()
                if step == 0:
                    with held_up(side):
                        groups[pair].all_reduce(array, stream=side)
                else:
                    groups[pair].asynchronous.all_reduce(array)
                arrays.append((array, sum(pair) + 2 * step))
        comm.barrier()
        bring_to_rest(comm)
        for array, wanted in arrays:
            assert_all(array, wanted)
    for pair in pairs if comm.rank % 2 else pairs[::-1]:
        if comm.rank in pair:
            groups[pair].close()


def launch_groups_in_one_order(comm: Any) -> None:
    """What a group launches after another one waits for it, though it is ready: two streams would wait crosswise."""
    first, second = comm.new_group(ranks_of(comm)), comm.new_group(ranks_of(comm))
    for group in (first, second):
        group.barrier()
    early, late, side = full(1), full(1), side_stream()
    with held_up(side):
        first.all_reduce(early, stream=side)
        future = second.asynchronous.all_reduce(late)
        client().barrier("all ranks have launched both")
        expect(gs.CollectiveTimeout, lambda: future._end.completion.wait(0.05))
    assert_all(future.result(), comm.world_size)
    assert_all(early, comm.world_size, side)


def launch_in_one_order_from_two_threads(comm: Any) -> None:
    """On the threads' own default streams, which CuPy has one object for."""
    first, second = comm.new_group(ranks_of(comm)), comm.new_group(ranks_of(comm))
    for group in (first, second):
        group.barrier()
    early, late, own = full(1), full(1), cupy.cuda.Stream.ptds
    device, futures = cupy.cuda.Device(), []

    def launch() -> None:
        with device, own:  # a thread begins on the first device
            futures.append(second.asynchronous.all_reduce(late, stream=own))

    with own:  # the null stream would wait for what holds this one up
        own.wait_event(cupy.cuda.Stream.null.record())
        with held_up(own):
            first.all_reduce(early, stream=own)
            thread = threading.Thread(target=launch)
            thread.start()
            thread.join()
            client().barrier("all ranks have launched both")
            expect(gs.CollectiveTimeout, lambda: futures[0]._end.completion.wait(0.05))
        assert_all(futures[0].result(), comm.world_size)
        assert_all(early, comm.world_size)


def end_a_group_by_its_member(comm: Any) -> str:
    """Rank 1 does not come to a collective of a group: the members are told, and so are all others."""
    group = comm.new_group([0, 1])
    if comm.rank == 0:
        error = expect(gs.CollectiveTimeout, lambda: group.all_reduce(full(1)))
        assert error.missing_ranks == (1,)
        return str(error)
    return wait_until_told(gs.CollectiveTimeout)
