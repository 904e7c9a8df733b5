"""The future of a gradient: not ready before its value is final, ready for ever after, and its own error."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_of
from bucketing.reference import outcome, step
from commands import wait_until


def in_thread(function):
    """What it returns or raises in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(outcome, function).result()


@pytest.mark.ranks(2, on=("shm", "fake", "gpu"))
def test_not_ready_before_its_value_is(comm):
    arrays = arrays_of(comm)
    sync = gs.AllreduceCallback("sum", comm)
    future = sync("w", arrays.put(np.full((2, 3), comm.rank + 1.0)))
    for ask in ("shape", "dtype", "device"):
        with pytest.raises(gs.FutureNotReady):
            getattr(future, ask)
    for ask in (future.numpy, future.exception, future.result, future.wait, lambda: np.asarray(future)):
        with pytest.raises(gs.FutureNotReady):
            ask()
    assert not future.done()
    assert "pending" in repr(future)
    seen, late = [], []
    future.add_done_callback(lambda done: seen.append(("before", done)))
    future.add_done_callback(lambda done: 1 / 0)  # logged, and harmless
    for wrong in ("1", float("nan"), -1):
        assert isinstance(in_thread(lambda wrong=wrong: future.result(wrong)), gs.InvalidArgument)
    assert isinstance(in_thread(lambda: future.result(0.01)), gs.CollectiveTimeout)
    waiter = threading.Thread(target=lambda: late.append(arrays.get(future.result())))
    waiter.start()
    sync.flush()
    waiter.join()
    wanted = np.full((2, 3), comm.world_size * (comm.world_size + 1) / 2)
    for array in (
        late[0],
        future.numpy(),
        np.asarray(future),
        np.array(future, np.float32),
        0.0 * wanted + future,
        future * np.ones(1),
    ):
        assert (array == wanted).all()
    for arithmetic in (lambda: 0.1 * future, lambda: future / 2, lambda: -future):
        with pytest.raises(TypeError, match=r"the gradient of 'w' is a future, and no array: its .result\(\) is one"):
            arithmetic()
    assert future.result() is future.result()
    assert (future.shape, np.dtype(future.dtype)) == ((2, 3), np.float64)
    assert (str(future.device) == "cpu") == (comm.device == "cpu")
    future.wait()
    assert future.exception() is None
    for wrong in ("1", float("nan"), -1):  # an error too where there is nothing to wait for
        with pytest.raises(gs.InvalidArgument):
            future.result(wrong)
        with pytest.raises(gs.InvalidArgument):
            future.wait(timeout=wrong)
    with pytest.raises(gs.InvalidArgument):
        future.add_done_callback(3)
    future.add_done_callback(lambda done: seen.append(("after", done)))
    wait_until(lambda: len(seen) == 2)  # on a GPU they run on another thread
    assert [what for what, _ in seen] == ["before", "after"]
    assert all(done is future for _, done in seen)


@pytest.mark.ranks(2, on=("shm", "fake"))
def test_a_done_callback_waits_for_no_gradient(comm):
    arrays = arrays_of(comm)
    sync, got = gs.AllreduceCallback("sum", comm), SimpleQueue()
    over = sync("w", arrays.put(np.ones(3)))
    sync.flush()
    waiting = sync("w", arrays.put(np.ones(3)))

    def ask(_):
        try:
            waiting.result()
        except gs.FutureNotReady as error:
            got.put(error)

    over.add_done_callback(ask)
    assert isinstance(got.get(), gs.FutureNotReady)
    sync.flush()
    assert (arrays.get(waiting.result()) == 2).all()


@pytest.mark.ranks(2)
def test_a_done_callback_cannot_hand_over_into_a_step_that_is_being_flushed(comm):
    sync, late, refused = gs.AllreduceCallback("sum", comm), [], []

    def hand_over(_):
        with pytest.raises(gs.InvalidArgument) as raised:
            late.append(sync("late", np.full(4, 7.0)))
        refused.append(raised.value)

    sync("a", np.ones(4)).add_done_callback(hand_over)
    sync.flush()
    assert refused
    assert not late
    assert (step(sync, {"a": np.ones(4)})["a"] == 2).all()


@pytest.mark.parametrize("fails", [False, True])
def test_a_done_callback_that_leaves_keeps_no_other_gradient_from_its_end(alone, fails):
    def leave(_):
        raise SystemExit(3)

    sync = gs.AllreduceCallback("sum", alone)
    futures = [sync(number, np.ones(2, dtype)) for number, dtype in enumerate(("float32", "float64", "complex64"))]
    for future in futures:
        future.add_done_callback(leave)
    with pytest.raises(SystemExit), sync.backward():
        if fails:
            raise ValueError("no such batch")
    assert all(isinstance(future.exception(), gs.GradientCancelled) == fails for future in futures)
    assert step(sync, {0: np.ones(2)})[0].tolist() == [1.0, 1.0]


def test_another_thread_waits_as_long_as_a_collective_may_take():
    with gs.init_process_group("local", collective_timeout_seconds=0.2) as world:
        for comm in (world, world.new_group([0])):
            sync = gs.AllreduceCallback("sum", comm)
            future = sync("w", np.ones(3))
            assert isinstance(in_thread(future.result), gs.CollectiveTimeout)
            sync.flush()


def test_the_thread_that_hands_over_never_waits_for_itself():
    """Whoever made the callback, or flushed the last step."""
    with gs.init_process_group("local", collective_timeout_seconds=0.2) as world:
        sync = gs.AllreduceCallback("sum", world)
        step(sync, {"w": np.ones(3)})
        future = in_thread(lambda: sync("w", np.ones(3)))
        assert isinstance(outcome(future.result), gs.CollectiveTimeout)
        sync.flush()
        assert in_thread(future.result).tolist() == [1.0] * 3
        assert isinstance(in_thread(lambda: sync("w", np.ones(3)).wait()), gs.FutureNotReady)
        sync.flush()


@pytest.mark.ranks(2, fresh=True, options={"collective_timeout_seconds": 1.0})
def test_another_thread_hears_which_ranks_have_not_come(comm, tmp_path):
    """It waits first, so that its own wait would end before the collective's, which knows who is missing."""
    if comm.rank:
        wait_until((tmp_path / "over").exists)
        with pytest.raises(gs.GradsyncError):
            comm.barrier()
        return
    sync, answers = gs.AllreduceCallback("sum", comm), SimpleQueue()
    future = sync("p", np.ones(3))
    waiter = threading.Thread(target=lambda: answers.put(in_thread(future.result)))
    waiter.start()
    with pytest.raises(gs.CollectiveTimeout) as raised:
        sync.flush()
    waiter.join()
    (tmp_path / "over").touch()
    for error in (raised.value, answers.get()):
        assert error.missing_ranks == (1,)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.ranks(2)
def test_the_child_of_a_fork_gets_an_error(comm):
    """Nobody reduces gradients there."""
    sync, called = gs.AllreduceCallback("sum", comm), []
    future = sync("w", np.ones(3))
    future.add_done_callback(called.append)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert isinstance(in_thread(future.result), gs.CommunicatorClosed)
            for ask in (future.result, sync.flush):
                with pytest.raises(gs.CommunicatorClosed):
                    ask()
            assert not called  # it is the parent's
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    sync.flush()
    assert (future.result() == 2).all()


@pytest.mark.ranks(2)
def test_a_future_does_not_leave_its_process(comm):
    sync = gs.AllreduceCallback("sum", comm)
    future = sync("w", np.ones(3))
    sync.flush()
    for each in (future, comm.asynchronous.all_reduce(np.ones(3))):
        for send in (comm.objects.all_gather, comm.objects.broadcast, gs.broadcast_tree):
            with pytest.raises(gs.InvalidArgument):
                send({"loss": each})
        for refused in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError):
                refused(each)


def test_a_future_computes_with_arrays_and_is_no_array_itself(alone):
    sync = gs.AllreduceCallback("sum", alone)
    with sync.backward():
        future = sync("w", np.full(3, 2.0))
    for array in (np.full(3, 5.0), np.float64(5), np.array(5.0)):
        assert (array - future == 3).all()
        assert (future - array == -3).all()
    weights = np.full(3, 5.0)
    weights -= future
    assert (weights == 3).all()
    for other in (3, "text"):
        with pytest.raises(TypeError):
            future + other
    for name in ("mean", "__len__", "__array_interface__"):
        assert not hasattr(future, name)


# -- Failed steps ------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, on=("shm", "fake"))
def test_the_future_of_a_failed_step_raises_its_error(comm):
    arrays = arrays_of(comm)
    sync = gs.AllreduceCallback("sum", comm)
    future = sync("w", arrays.put(np.ones(2 + comm.rank)))
    with pytest.raises(gs.PlanMismatch) as raised:
        sync.flush()
    assert future.done()
    assert str(future.exception()) == str(raised.value)
    for ask in (future.result, future.numpy, lambda: future.shape, lambda: np.asarray(future)):
        with pytest.raises(gs.PlanMismatch):
            ask()
    assert "failed with PlanMismatch" in repr(future)


def fail_and_wait(comm):
    sync = gs.AllreduceCallback("mean", comm)
    future = sync("a" if comm.rank else "b", np.ones(2))
    with pytest.raises(gs.PlanMismatch):
        sync.flush()
    return type(outcome(future.wait))


def test_wait_raises_what_result_raises(run_on_ranks):
    assert run_on_ranks(2, fail_and_wait) == [gs.PlanMismatch] * 2


def ask_early(comm, options):
    """What a future says after the bucket of its gradient is full, before the flush."""
    sync = gs.AllreduceCallback("sum", comm, threshold_bytes=16, **options)
    first = sync("a", np.full(4, 100.0))
    sync("b", np.ones(4))
    is_early = first.done()
    sync.flush()
    return is_early, first.done(), float(first.result()[0])


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1e9}, {"parameters": dict.fromkeys("ab", ((4,), "float64"))}])
def test_a_future_is_done_at_the_end_of_the_flush(run_on_ranks, options):
    assert run_on_ranks(2, ask_early, options) == [(False, True, 200.0)] * 2
