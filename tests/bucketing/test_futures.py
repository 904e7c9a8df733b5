"""A gradient's future: not ready before its bucket is reduced, and ready for ever after."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import time
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import expect
from gradsync.communicators.local import local_communicator
from kits import make_kit
from places import GPU, SHM, STAND_IN, Place, on
from rank_processes import run_ranks


def ask_too_early(comm: Any, kit_name: str) -> None:
    kit = make_kit(comm, kit_name)
    sync = gs.AllreduceCallback("sum", comm)
    future = sync("w", kit.put(np.full((2, 3), comm.rank + 1.0)))
    for ask in ("shape", "dtype", "device"):
        expect(gs.FutureNotReady, lambda ask=ask: getattr(future, ask), f"{ask} of the gradient of 'w' is not ready")
    for ask in ("numpy", "exception", "result", "wait"):
        expect(gs.FutureNotReady, getattr(future, ask), "the gradient of 'w' is not ready")
    expect(gs.FutureNotReady, lambda: np.asarray(future), "the gradient of 'w' is not ready")
    assert not future.done()
    assert "pending" in repr(future)

    seen: list[Any] = []
    future.add_done_callback(lambda done: seen.append(("before", done)))
    future.add_done_callback(lambda done: 1 / 0)  # logged, and harmless
    late: list[Any] = []
    for wrong in ("1", float("nan"), -1):
        confused = threading.Thread(
            target=lambda wrong=wrong: late.append(expect(gs.InvalidArgument, lambda: future.result(wrong)))
        )
        confused.start()
        confused.join(30)
        assert "needs timeout to be a number of seconds" in str(late.pop())
    waiter = threading.Thread(target=lambda: late.append(kit.get(future.result())))
    hurried = threading.Thread(target=lambda: late.append(expect(gs.CollectiveTimeout, lambda: future.result(0.01))))
    hurried.start()
    hurried.join(30)
    text = str(late.pop())
    assert "was not reduced within 0.01 s" in text
    assert "flush()" in text
    waiter.start()
    sync.flush()
    waiter.join(30)

    wanted = np.full((2, 3), comm.world_size * (comm.world_size + 1) / 2)
    assert (late[0] == wanted).all()
    assert (future.numpy() == wanted).all()
    for array in (np.asarray(future), np.array(future, np.float32), 0.0 * wanted + future):
        assert (array == wanted).all()
    if kit_name == "numpy":
        assert np.asarray(future) is future.result()
        assert not np.shares_memory(np.array(future), future.result())
    assert future.result() is future.result()
    assert (future.shape, np.dtype(future.dtype)) == ((2, 3), np.float64)
    assert (str(future.device) == "cpu") == (kit_name == "numpy")
    future.wait()
    assert future.exception() is None
    assert "ready" in repr(future)
    for wrong in ("1", float("nan"), -1):  # an error too where there is nothing to wait for
        expect(gs.InvalidArgument, lambda wrong=wrong: future.result(wrong), "needs timeout to be a number of seconds")
        expect(gs.InvalidArgument, lambda wrong=wrong: future.wait(timeout=wrong), "needs timeout to be a number")
    expect(gs.InvalidArgument, lambda: future.add_done_callback(3), "add_done_callback needs a function")
    future.add_done_callback(lambda done: seen.append(("after", done)))
    while len(seen) < 2:  # on a GPU they run in a thread of the communicator
        threading.Event().wait(0.01)
    assert [what for what, _ in seen] == ["before", "after"]
    assert all(done is future for _, done in seen)


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 1, 2), *on(STAND_IN, 2), *on(GPU, 2)])
def test_not_ready_before_the_value_is(place: Place, world_size: int) -> None:
    place.run(world_size, ask_too_early, place.kit)


def ask_in_a_callback(comm: Any, kit_name: str) -> None:
    kit = make_kit(comm, kit_name)
    sync = gs.AllreduceCallback("sum", comm)
    over = sync("w", kit.put(np.ones(3)))
    sync.flush()
    waiting = sync("w", kit.put(np.ones(3)))
    got: SimpleQueue[Any] = SimpleQueue()
    over.add_done_callback(
        lambda _: got.put(expect(gs.FutureNotReady, waiting.result, "a done-callback cannot wait for a collective"))
    )
    assert "call flush()" not in str(got.get(timeout=30))  # that it must not
    sync.flush()
    kit.get(waiting.result())


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 1, 2), *on(STAND_IN, 2), *on(GPU, 2)])
def test_a_done_callback_that_waits_is_given_no_advice_that_is_refused(place: Place, world_size: int) -> None:
    place.run(world_size, ask_in_a_callback, place.kit)


def test_another_thread_of_a_world_of_one_waits_as_long_as_a_collective_may_take() -> None:
    with gs.init_process_group("local", rank=0, world_size=1, collective_timeout_seconds=0.2) as world:
        for comm in (world, world.new_group([0])):
            sync = gs.AllreduceCallback("sum", comm)
            future = sync("w", np.ones(3))
            late: list[Any] = []
            waiter = threading.Thread(
                target=lambda future=future, late=late: late.append(expect(gs.CollectiveTimeout, future.result)),
                daemon=True,  # where it waits for longer than this test
            )
            waiter.start()
            waiter.join(30)
            sync.flush()
            assert "was not reduced within 0.2 s" in str(late.pop())


def ask_after_a_fork(comm: Any, kit_name: str) -> None:
    """Nobody reduces gradients in the child: its threads would wait, and its own one be told to flush."""
    kit = make_kit(comm, kit_name)
    sync = gs.AllreduceCallback("sum", comm)
    future = sync("w", kit.put(np.ones(3)))
    called: list[Any] = []
    future.add_done_callback(called.append)
    array = kit.put(np.ones(3))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            told: list[Any] = []
            waiter = threading.Thread(target=lambda: told.append(expect(gs.CommunicatorClosed, future.result)))
            waiter.start()
            waiter.join(30)
            told.append(expect(gs.CommunicatorClosed, future.result))
            assert len(told) == 2
            assert all("belongs to the parent process of this forked process" in str(error) for error in told)
            assert future.done()
            expect(gs.CommunicatorClosed, sync.flush)
            expect(gs.CommunicatorClosed, lambda: comm.asynchronous.all_reduce(array).result())
            assert not called  # it is the parent's
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    sync.flush()
    assert (kit.get(future.result()) == comm.world_size).all()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 1, 2), *on(STAND_IN, 2)])
def test_the_child_of_a_fork_gets_an_error(place: Place, world_size: int) -> None:
    place.run(world_size, ask_after_a_fork, place.kit)


def send_futures(comm: Any, kit_name: str) -> None:
    kit = make_kit(comm, kit_name)
    sync = gs.AllreduceCallback("sum", comm)
    future = sync("w", kit.put(np.ones(3)))
    sync.flush()
    wanted = "cannot be pickled or copied: pass its .result()"
    for each in (future, comm.asynchronous.all_reduce(kit.put(np.ones(3)))):
        for send in (comm.objects.all_gather, comm.objects.broadcast):
            expect(gs.InvalidArgument, lambda send=send, each=each: send({"loss": each}), wanted)
        expect(gs.InvalidArgument, lambda each=each: gs.broadcast_tree({"loss": each}, communicator=comm), wanted)
        expect(TypeError, lambda each=each: copy.copy(each), wanted)


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 2), *on(STAND_IN, 2)])
def test_a_future_does_not_leave_its_process(place: Place, world_size: int) -> None:
    place.run(world_size, send_futures, place.kit)


def fail_a_step(comm: Any) -> None:
    sync = gs.AllreduceCallback("sum", comm)
    future = sync("w", np.ones(2 + comm.rank))
    error = expect(gs.PlanMismatch, sync.flush)
    assert future.done()
    assert str(future.exception()) == str(error)
    future.wait()
    for ask in (future.result, future.numpy, lambda: future.shape, lambda: np.asarray(future)):
        expect(gs.PlanMismatch, ask)
    assert "failed with PlanMismatch" in repr(future)


def test_the_error_is_each_futures_own() -> None:
    SHM.run(2, fail_a_step)


def ask_before_the_bucket_is_full(comm: Any) -> list[str]:
    """Another thread asks first, so that its wait would end before the collective's, which says who is missing."""
    told: list[str] = []
    if comm.rank == 1:
        time.sleep(2.5)
        return told

    def ask(future: gs.GradientFuture) -> None:
        try:
            future.result()
        except gs.CollectiveTimeout as error:
            told.append(str(error))

    sync = gs.AllreduceCallback("sum", comm)
    waiter = threading.Thread(target=ask, args=[sync("p", np.ones(3))])
    waiter.start()
    time.sleep(0.4)
    expect(gs.CollectiveTimeout, sync.flush)
    waiter.join()
    return told


def test_another_thread_hears_which_ranks_have_not_come() -> None:
    (told,), _ = run_ranks(2, ask_before_the_bucket_is_full, collective_timeout_seconds=1.0)
    assert "rank 1" in told.partition(":")[2]
    assert "was not reduced within" not in told


def test_a_future_computes_with_arrays_and_is_no_array_itself() -> None:
    sync = gs.AllreduceCallback("sum", local_communicator())
    with sync.backward():
        future = sync("w", np.full(3, 2.0))
    for array in (np.full(3, 5.0), np.float64(5), np.int32(5), np.array(5.0)):
        assert (array - future == 3).all()
        assert (future - array == -3).all()
        assert (array**future == 25).all()
    weights = np.full(3, 5.0)
    weights -= future
    assert (weights == 3).all()
    for other in (3, 0.5, "text"):
        expect(TypeError, lambda other=other: future + other, "'GradientFuture'")
    for name in ("mean", "_mean", "__len__", "__deepcopy__", "__array_interface__"):
        assert not hasattr(future, name)
    for refused in (pickle.dumps, copy.copy, copy.deepcopy):
        expect(TypeError, partial(refused, future), "cannot be pickled or copied")
