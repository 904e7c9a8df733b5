"""The contract of the asynchronous form: the same arguments, the same results, in futures, in one order."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np

import gradsync as gs
from contract import assert_identical, bounds_of, contribution, expect, note

SECONDS = 30.0  # for what must come at all
_SHAPES = [(4,), (400, 4), (60_000,)]

Form = Callable[[Any], Any]


def collectives(comm: Any, kit: Any, shape: tuple[int, ...]) -> dict[str, Form]:
    """Returns every collective by name, with new arrays; called with a communicator, or with its asynchronous form."""
    n, rank = comm.world_size, comm.rank
    root, after, before = n - 1, (rank + 1) % n, (rank - 1) % n
    sizes = [1 + place for place in range(n)]
    tail = shape[1:]
    uneven = (sum(sizes), *tail)

    def mine(of_shape: tuple[int, ...] = shape) -> Any:
        return kit.put(contribution(rank, of_shape, "float32"))

    def room(of_shape: tuple[int, ...]) -> Any:
        return kit.put(np.zeros(of_shape, np.float32))

    own_rows = mine((sizes[rank], *tail))
    return {
        "all_reduce": lambda form: form.all_reduce(mine(), "mean"),
        "all_reduce into out": lambda form: form.all_reduce(mine(), "max", out=room(shape)),
        "reduce": lambda form: form.reduce(mine(), "prod", root),
        "reduce_scatter": lambda form: form.reduce_scatter(mine((shape[0] * n, *tail))),
        "reduce_scatter of sizes": lambda form: form.reduce_scatter(mine(uneven), "min", sizes=sizes),
        "broadcast": lambda form: form.broadcast(mine(), root),
        "all_gather": lambda form: form.all_gather(mine()),
        "all_gather of sizes": lambda form: form.all_gather(own_rows, sizes=sizes, out=room(uneven)),
        "gather": lambda form: form.gather(mine(), root),
        "scatter": lambda form: form.scatter(
            mine((shape[0] * n, *tail)) if rank == root else None, root, out=room(shape)
        ),
        "all_to_all": lambda form: form.all_to_all(mine((shape[0] * n, *tail))),
        "all_to_all of sizes": lambda form: form.all_to_all(
            mine(uneven), send_sizes=sizes, recv_sizes=[sizes[rank]] * n
        ),
        "exchange": lambda form: form.exchange(mine(), dest=after, out=room(shape), source=before),
        "barrier": lambda form: form.barrier(),
    }


def check_every_collective_gives_the_same(comm: Any, kit: Any) -> None:
    for shape in _SHAPES:
        for collective in collectives(comm, kit, shape).values():
            want = collective(comm)
            future = collective(comm.asynchronous)
            got = future.result(SECONDS)
            if want is None:
                assert got is None
            else:
                assert_identical(kit.get(got), kit.get(want))
            comm.barrier()  # on a GPU it has ended once a later one has
            assert future.done()
            assert future.exception() is None
    note("each, asynchronous", "float32")


def check_many_in_flight(comm: Any, kit: Any) -> None:
    """All submitted at once, then taken from the last to the first."""
    for shape in _SHAPES:
        names = list(collectives(comm, kit, shape))
        wanted = {name: collectives(comm, kit, shape)[name](comm) for name in names}
        futures = {name: collectives(comm, kit, shape)[name](comm.asynchronous) for name in names}
        for name in reversed(names):
            got = futures[name].result(SECONDS)
            if wanted[name] is not None:
                assert_identical(kit.get(got), kit.get(wanted[name]))


def check_synchronous_after_asynchronous(comm: Any, kit: Any) -> None:
    """One order: a synchronous collective comes after what was submitted before it."""
    form = comm.asynchronous
    futures = [form.all_reduce(kit.put(np.full(50_000, float(call)))) for call in range(5)]
    comm.barrier()
    assert all(future.done() for future in futures)
    for call, future in enumerate(futures):
        assert (kit.get(future.result(SECONDS)) == call * comm.world_size).all()


def check_messages_in_the_background(comm: Any, kit: Any) -> None:
    if comm.world_size == 1:
        return
    first, last = 0, comm.world_size - 1
    values = contribution(first, (70_001,), "int32")
    if comm.rank == first:
        assert comm.asynchronous.send(kit.put(values), last).result(SECONDS) is None
    elif comm.rank == last:
        target = kit.put(np.zeros_like(values))
        assert comm.asynchronous.recv(target, first).result(SECONDS) is target
        assert_identical(kit.get(target), values)
    comm.barrier()


def check_mistakes_are_told_at_once(comm: Any, kit: Any) -> None:
    """By the call, on this rank alone, before anything is queued."""
    form = comm.asynchronous
    array = kit.put(np.ones(3))
    expect(gs.InvalidArgument, lambda: form.all_reduce([1.0]))
    expect(gs.InvalidArgument, lambda: form.broadcast(array, comm.world_size), "root")
    expect(gs.InvalidArgument, lambda: form.all_gather(array, out=kit.put(np.ones(1, np.int8))))
    expect(gs.UnsupportedDtype, lambda: form.all_reduce(kit.put(np.ones(3, bool)), "sum"))
    assert_identical(kit.get(form.all_reduce(array).result(SECONDS)), np.full(3, float(comm.world_size)))


def check_disagreement_fails_its_future_only(comm: Any, kit: Any) -> None:
    if comm.world_size == 1:
        return
    odd = comm.rank == comm.world_size - 1
    before = comm.asynchronous.all_reduce(kit.put(np.ones(5)))
    wrong = comm.asynchronous.all_reduce(kit.put(np.ones(3 if odd else 4)))
    error = expect(gs.PlanMismatch, lambda: wrong.result(SECONDS))
    assert wrong.done()
    assert str(wrong.exception()) == str(error)
    after = comm.asynchronous.all_reduce(kit.put(np.ones(6)))
    assert (kit.get(before.result(SECONDS)) == comm.world_size).all()
    assert (kit.get(after.result(SECONDS)) == comm.world_size).all()


def check_callbacks_are_told(comm: Any, kit: Any) -> None:
    told: SimpleQueue[Any] = SimpleQueue()
    future = comm.asynchronous.all_reduce(kit.put(np.ones(4)))
    future.add_done_callback(told.put)
    assert told.get(timeout=SECONDS) is future
    future.add_done_callback(told.put)  # it is done already
    assert told.get(timeout=SECONDS) is future
    expect(gs.InvalidArgument, lambda: future.add_done_callback(3), "all_reduce: add_done_callback needs a function")
    for wrong in ("1", -1):
        expect(gs.InvalidArgument, lambda wrong=wrong: future.result(wrong), "needs timeout to be a number of seconds")


def check_in_place_in_the_background(comm: Any, kit: Any) -> None:
    sizes = [2 + place for place in range(comm.world_size)]
    bounds = bounds_of(sizes)
    memory = kit.put(np.zeros(bounds[-1], np.int64))
    own = memory[bounds[comm.rank] : bounds[comm.rank + 1]]
    own[...] = kit.put(contribution(comm.rank, (sizes[comm.rank],), "int64"))
    comm.asynchronous.all_gather(own, sizes=sizes, out=memory).result(SECONDS)
    want = [contribution(rank, (rows,), "int64") for rank, rows in enumerate(sizes)]
    assert_identical(kit.get(memory), np.concatenate(want))
