"""communicator.asynchronous and its futures: the same arguments, the same results, one order."""

import gc
import time
import weakref
from itertools import product
from queue import SimpleQueue

import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_for, arrays_of, assert_identical
from bucketing.reference import Heard
from collectives import collectives
from commands import wait_until
from ranks import ALSO_ALONE, COMPARED, EVERYWHERE, ON_GPU

SHAPES = [(4,), (400, 4), (60_000,)]


@pytest.mark.ranks(on=ALSO_ALONE | ON_GPU)
def test_every_collective_gives_the_same(comm):
    """Also where many are submitted, and their results are asked for from the last to the first."""
    for arrays, shape in product(arrays_for(comm), SHAPES):
        wanted = {name: call(comm) for name, call in collectives(comm, arrays, shape).items()}
        futures = {name: call(comm.asynchronous) for name, call in collectives(comm, arrays, shape).items()}
        for name, future in reversed(futures.items()):
            got = future.result()
            if wanted[name] is None:
                assert got is None, name
            else:
                assert_identical(arrays.get(got), arrays.get(wanted[name]))
            assert future.wait() is None
        comm.barrier()  # on a GPU they have ended once a later one has
        for future in futures.values():
            assert future.done()
            assert future.exception() is None


@pytest.mark.ranks(on=EVERYWHERE)
def test_a_blocking_collective_comes_after_all_that_were_submitted(comm):
    arrays = arrays_of(comm)
    futures = [comm.asynchronous.all_reduce(arrays.put(np.full(50_000, float(call)))) for call in range(5)]
    comm.barrier()
    assert all(future.done() for future in futures)
    for call, future in enumerate(futures):
        assert (arrays.get(future.result()) == call * comm.world_size).all()


@pytest.mark.ranks(3, on=("shm", "fake"))
def test_groups_that_overlap_keep_one_order(comm):
    """Else rank 1 would meet rank 0 in one group while rank 2 waits for it in the other."""
    arrays = arrays_of(comm)
    mine = [pair for pair in map(comm.new_group, ([0, 1], [1, 2], [0, 2])) if pair]
    expected, futures = [], []
    for step in range(40):
        for pair in mine:
            futures.append(pair.asynchronous.all_reduce(arrays.put(np.full(10, float(comm.rank + step)))))
            expected.append(float(sum(pair.ranks) + 2 * step))
        if step % 10 == 0:
            comm.barrier()
    assert [float(arrays.get(future.result())[0]) for future in futures] == expected
    for pair in mine:
        pair.close()


@pytest.mark.ranks(on=EVERYWHERE | ON_GPU)
def test_arrays_live_until_the_future_is_done_and_no_longer(comm):
    for arrays, size in product(arrays_for(comm), (10, 300_000)):
        futures, kept = [], []
        for call in range(4):
            array = arrays.put(np.full(size, float(call)))
            kept.append(weakref.ref(array))
            futures.append(comm.asynchronous.all_reduce(array, out=arrays.put(np.zeros(size))))
            del array
        over = [arrays.put(np.full(size, -1.0)) for _ in range(4)]  # where freed arrays would have been
        for call, future in enumerate(futures):
            assert (arrays.get(future.result()) == call * comm.world_size).all()
        del future, futures, over
        comm.barrier()

        def are_gone(kept=kept):
            gc.collect()
            return all(array() is None for array in kept)

        wait_until(are_gone)


@pytest.mark.ranks(2)
def test_one_scratch_array_for_several_calls(comm, tmp_path):
    """On the CPU a collective runs within its call, so that its source is free afterwards."""
    scratch, futures = np.empty(200_000), []
    if comm.rank == 1:
        until = time.monotonic() + 0.5  # rank 0 waits for this one in its first call, or goes on without
        while not (tmp_path / "overwritten").exists() and time.monotonic() < until:
            time.sleep(0.01)
    for number in range(6):
        scratch[:] = number + comm.rank
        futures.append(comm.asynchronous.all_reduce(scratch, "sum", out=np.empty(200_000)))
    (tmp_path / "overwritten").touch()
    assert [float(future.result()[0]) for future in futures] == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]


# -- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(on=EVERYWHERE)
def test_a_wrong_argument_is_refused_by_the_call(comm):
    form, arrays = comm.asynchronous, arrays_of(comm)
    array = arrays.put(np.ones(3))
    if comm.rank == 0:  # alone: nothing has been submitted
        for kind, call in (
            (gs.InvalidArgument, lambda: form.all_reduce([1.0])),
            (gs.InvalidArgument, lambda: form.broadcast(array, comm.world_size)),
            (gs.InvalidArgument, lambda: form.all_gather(array, out=arrays.put(np.ones(1, np.int8)))),
            (gs.UnsupportedDtype, lambda: form.all_reduce(arrays.put(np.ones(3, bool)), "sum")),
            (gs.InvalidArgument, lambda: comm.all_reduce(form)),
        ):
            with pytest.raises(kind):
                call()
    future = form.all_reduce(array)
    assert (arrays.get(future.result()) == comm.world_size).all()
    with pytest.raises(gs.InvalidArgument, match="result"):  # the advice
        comm.all_reduce(future)
    for wrong in ("1", -1):
        with pytest.raises(gs.InvalidArgument, match="timeout"):
            future.result(wrong)


@pytest.mark.ranks(on=COMPARED)
def test_disagreement_fails_only_its_future(comm):
    arrays = arrays_of(comm)
    odd = comm.rank == comm.world_size - 1
    before = comm.asynchronous.all_reduce(arrays.put(np.ones(5)))
    wrong = comm.asynchronous.all_reduce(arrays.put(np.ones(3 if odd else 4)))
    for ask in (wrong.result, wrong.wait, wrong.result):
        with pytest.raises(gs.PlanMismatch) as raised:
            ask()
        assert set(raised.value.descriptions) == set(comm.ranks)
        assert all("test_asynchronous.py" in place for place in raised.value.places.values())
    assert wrong.done()
    assert isinstance(wrong.exception(), gs.PlanMismatch)
    after = comm.asynchronous.all_reduce(arrays.put(np.ones(6)))
    for future in (before, after):
        assert (arrays.get(future.result()) == comm.world_size).all()


@pytest.mark.ranks(on=dict.fromkeys(COMPARED, (2,)))
def test_a_failure_that_nobody_asks_for_is_logged_once(comm):
    """On the CPU as its future is deleted: nothing in it waits for the garbage collector, and its arrays go with it."""
    if comm.device == "cpu":
        gc.disable()
        try:
            with Heard() as lines:
                array = np.ones(3 + comm.rank)
                future, kept = comm.asynchronous.all_reduce(array), weakref.ref(array)
                del array
                del future
                assert len(lines) == 1
                assert kept() is None
        finally:
            gc.enable()
    with Heard() as lines:
        for is_asked in (True, False):
            future = comm.asynchronous.all_reduce(arrays_of(comm).put(np.ones(3 + comm.rank)))
            wait_until(future.done)  # to look is not to ask why it failed
            if is_asked:
                assert isinstance(future.exception(), gs.PlanMismatch)
            del future
            gc.collect()
            comm.barrier()
            assert not (is_asked and lines)

        def is_logged():
            gc.collect()
            return any("PlanMismatch" in line for line in lines)

        wait_until(is_logged)
    assert sum("PlanMismatch" in line for line in lines) == 1


# -- Done-callbacks ---------------------------------------------------------------------------------------------------


@pytest.mark.ranks(on=EVERYWHERE | ON_GPU)
def test_each_done_callback_is_called_once_with_the_future(comm):
    """What one of them raises is logged, and hurts nobody."""
    called, arrays = SimpleQueue(), arrays_of(comm)
    with Heard() as lines:
        future = comm.asynchronous.all_reduce(arrays.put(np.ones(4)))
        future.add_done_callback(lambda _: 1 / 0)
        for number in (1, 2):
            future.add_done_callback(lambda future, number=number: called.put((number, future)))
        assert sorted(called.get(timeout=60)[0] for _ in range(2)) == [1, 2]
        assert (arrays.get(future.result()) == comm.world_size).all()
    assert len(lines) == 1
    future.add_done_callback(lambda future: called.put((3, future)))  # at once
    assert called.get(timeout=60) == (3, future)
    assert called.empty()
    with pytest.raises(gs.InvalidArgument, match="function"):
        future.add_done_callback(3)


def calls_in_a_callback(comm, array, sync):
    peer = (comm.rank + 1) % comm.world_size
    calls = [
        lambda: comm.all_reduce(array),
        lambda: comm.broadcast(array),
        comm.barrier,
        lambda: comm.exchange(array, dest=peer, out=array, source=peer),
        lambda: comm.objects.all_gather("an object"),
        lambda: comm.asynchronous.all_reduce(array),
        lambda: sync("late", array),
        sync.flush,
        lambda: gs.average_gradients({"w": array}, communicator=comm),
        lambda: gs.bcast_list_([array], 0, comm),
        lambda: gs.broadcast_tree({"w": array}, communicator=comm),
        lambda: comm.new_group([comm.rank]),
        lambda: comm.split(0),
        gs.comm.synchronize,
    ]
    if comm.world_size > 1:
        calls += [lambda: comm.send(array, peer), lambda: comm.recv(array, peer)]
    return calls


@pytest.mark.ranks(on={"local": (1,), "shm": (2, 3), "fake": (2,), "mpi": (2,)})
def test_a_done_callback_may_call_no_collective(comm):
    """Ranks would run them in different orders. A future that is done may be read."""
    arrays = arrays_of(comm)
    array, sync = arrays.put(np.ones(2 * comm.world_size)), gs.AllreduceCallback("sum", comm)
    for call in calls_in_a_callback(comm, array, sync):
        outcomes = SimpleQueue()

        def attempt(future, call=call, outcomes=outcomes):
            outcomes.put(future.result() is not None)
            try:
                outcomes.put(call())
            except gs.InvalidArgument as error:
                outcomes.put(error)

        future = comm.asynchronous.all_reduce(arrays.put(np.ones(3)))
        future.add_done_callback(attempt)
        assert outcomes.get(timeout=60) is True
        error = outcomes.get(timeout=60)
        assert isinstance(error, gs.InvalidArgument)
        assert "test_asynchronous.py" in str(error)  # the line of the call
        assert (arrays.get(future.result()) == comm.world_size).all()
        comm.barrier()
