"""Checks that gradients in flight are read-only, and writeable again after every way out; see test_gradient_lock.py."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pickle
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

import gradsync as gs
from contract import expect
from gradsync.bucketing import take_forgotten
from kits import bring_to_rest

F4 = np.dtype("float32")
SIZE = 12


class Tagged(np.ndarray):
    """A subclass of a program's own."""


class Made(NamedTuple):
    """A gradient, and whether it is to be locked."""

    array: Any
    is_locked: bool


def _read_only() -> np.ndarray[Any, Any]:
    array = np.ones(SIZE, F4)
    array.flags.writeable = False
    return array


def _view_of_read_only() -> np.ndarray[Any, Any]:
    base = np.ones(SIZE, F4)
    view = base[:]
    base.flags.writeable = False
    return view  # which stays writeable, but once locked could not be set back


def _memmap() -> np.ndarray[Any, Any]:
    with tempfile.TemporaryFile() as file:
        array = np.memmap(file, F4, "w+", shape=(SIZE,))
    array[...] = 1
    return array


def _foreign(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array[...] = 1
    return array


def _overlapping() -> np.ndarray[Any, Any]:
    return np.ndarray((3, 2), F4, np.ones(SIZE, F4), strides=(4, 4))


LAYOUTS: dict[str, Callable[[], Made]] = {
    "plain": lambda: Made(np.ones((3, 4), F4), True),
    "fortran": lambda: Made(np.ones((3, 4), F4, order="F"), True),
    "strided": lambda: Made(np.ones((6, 8), F4)[::2, ::3], True),
    "reversed": lambda: Made(np.ones(SIZE, F4)[::-1], True),
    "0-d": lambda: Made(np.ones((), F4), True),
    "0-d view": lambda: Made(np.ones(3, F4)[1, ...], True),
    "empty": lambda: Made(np.ones((0, 3), F4), False),  # nothing in it can be written to
    "view of views": lambda: Made(np.ones(20, F4)[2:18][1:].reshape(3, 5)[:2], True),
    "matrix": lambda: Made(np.ones((3, 4), F4).view(np.matrix), True),
    "subclass": lambda: Made(np.ones(SIZE, F4).view(Tagged)[2:], True),
    "overlapping": lambda: Made(_overlapping(), True),
    "pickle": lambda: Made(pickle.loads(pickle.dumps(np.ones(SIZE, F4), 5)), False),
    "read-only": lambda: Made(_read_only(), False),
    "view of read-only": lambda: Made(_view_of_read_only(), False),
    "broadcast": lambda: Made(np.broadcast_to(np.ones(4, F4), (3, 4)), False),
    "memmap": lambda: Made(_memmap(), False),
    "bytearray": lambda: Made(_foreign(np.frombuffer(bytearray(4 * SIZE), F4)), False),
    "mmap": lambda: Made(_foreign(np.frombuffer(mmap.mmap(-1, 4096), F4)[:SIZE]), False),
    "ctypes": lambda: Made(_foreign(np.ctypeslib.as_array((ctypes.c_float * SIZE)())), False),
    "misaligned": lambda: Made(_foreign(np.frombuffer(bytearray(4 * SIZE + 1), F4, offset=1)), False),
    "dlpack": lambda: Made(np.from_dlpack(np.ones(SIZE, F4)), False),
}


def is_writeable(array: Any) -> bool:
    return bool(array.flags.writeable)


def expect_locked(array: Any) -> None:
    def write() -> None:
        array[...] += 1

    expect(ValueError, write, "read-only")


@contextmanager
def flags_kept(*arrays: Any) -> Iterator[None]:
    """Whatever happens inside, afterwards each array is as writeable as it was."""
    before = [is_writeable(array) for array in arrays]
    yield
    assert [is_writeable(array) for array in arrays] == before


# -- What is locked ------------------------------------------------------------------------------------------------


def lock_each_layout(comm: Any, _kit: str) -> None:
    """The very arrays come again, so that they are known from the third step on."""
    made = {name: make() for name, make in LAYOUTS.items()}
    sync = gs.AllreduceCallback("mean", comm)
    for step in range(5):
        for array, _ in made.values():
            if is_writeable(array):
                array[...] = step + comm.rank
        with flags_kept(*[array for array, _ in made.values()]), sync.backward():
            futures = {name: sync(name, array) for name, (array, _) in made.items()}
            for name, (array, is_locked) in made.items():
                assert is_writeable(array) == (not is_locked and name not in ("read-only", "broadcast")), name
                if is_locked:
                    expect_locked(array)
        for name, (array, _) in made.items():
            wanted = (step if is_writeable(array) else 1) + (comm.world_size - 1) / 2 * is_writeable(array)
            assert (np.asarray(futures[name].result()) == wanted).all(), name
            is_fresh = not is_writeable(array) or name == "overlapping"
            assert (futures[name].result() is not array) == is_fresh, name


def unlock_as_soon_as_done(comm: Any, _kit: str) -> None:
    """A bucket that is full is reduced, and its gradients are the caller's, long before the flush."""
    seen: list[bool] = []
    called = threading.Semaphore(0)

    def look(future: Any) -> None:
        seen.append(is_writeable(future.result()))
        called.release()

    gradients = [np.ones(SIZE, F4), np.ones((3, 4), F4, order="F"), np.ones(SIZE, F4)]
    sync = gs.AllreduceCallback("sum", comm, threshold_bytes=2 * 4 * SIZE)
    for _ in range(4):
        for gradient in gradients:
            gradient[...] = 1
        first = sync("a", gradients[0])
        first.add_done_callback(look)
        expect_locked(gradients[0])
        second = sync("b", gradients[1])
        assert first.result() is gradients[0]
        gradients[0] += 1  # the same bucket: reduced
        assert (second.result() == comm.world_size).all()
        gradients[1][...] *= 2
        sync("c", gradients[2])
        expect_locked(gradients[2])
        sync.flush()
        bring_to_rest(comm)
        assert called.acquire(timeout=30)
        np.multiply(gradients[2], 2, out=gradients[2])
        assert (gradients[0] == comm.world_size + 1).all()
        assert (gradients[1] == 2 * comm.world_size).all()
        assert (gradients[2] == 2 * comm.world_size).all()
    assert seen == [True] * 4


def share_a_buffer(comm: Any, _kit: str) -> None:
    """Two gradients of one buffer: each is locked by itself; the buffer and older views can be written to."""
    big = np.ones(2 * SIZE, F4)
    older_view = big[:SIZE]
    halves = {"low": big[:SIZE], "high": big[SIZE:]}
    for threshold_bytes in (10**6, 1):
        sync = gs.AllreduceCallback("mean", comm, threshold_bytes=threshold_bytes)
        for step in range(4):
            big[...] = 1
            with flags_kept(*halves.values()), sync.backward():
                futures = {name: sync(name, half) for name, half in halves.items()}
                if threshold_bytes > 1:
                    for half in halves.values():
                        expect_locked(half)
                    older_view[...] = 2
                    big.flags.writeable = step % 2 == 0  # views older than that stay as they were
            big.flags.writeable = True
            assert (big[SIZE:] == 1).all()
            is_seen = threshold_bytes > 1 and comm.backend != "nccl"  # there, it is copied when it is handed over
            assert (big[:SIZE] == (2 if is_seen else 1)).all()
            assert all(futures[name].result() is half for name, half in halves.items())


def use_every_knob(comm: Any, _kit: str) -> None:
    """What is written after the reduction, by gradsync itself, is written all the same."""
    world = comm.world_size
    knobs: list[tuple[dict[str, Any], float]] = [
        ({"clip_norm": 1e-3}, 0.0),
        ({"nonfinite": "skip"}, world),
        ({"parameters": dict.fromkeys("abc", ((3, 4), "float32")), "missing": "zero"}, world),
        ({"parameters": dict.fromkeys("ab", ((3, 4), "float32"))}, world),
    ]
    for options, wanted in knobs:
        sync = gs.AllreduceCallback("sum", comm, **options)
        flat, fortran = np.ones((3, 4), F4), np.ones((3, 4), F4, order="F")
        for _ in range(4):
            flat[...] = fortran[...] = 1
            with flags_kept(flat, fortran), sync.backward():
                sync("a", flat)
                expect_locked(flat)
                sync("b", fortran)
            np.testing.assert_allclose(flat, wanted, atol=1e-3, err_msg=str(options))
            np.testing.assert_allclose(fortran, wanted, atol=1e-3, err_msg=str(options))
            assert all(is_writeable(zeros) for zeros in sync.filled.values() if isinstance(zeros, np.ndarray))


def use_a_hook(comm: Any, _kit: str) -> None:
    sync = gs.AllreduceCallback("sum", comm)
    sync.register_hook(lambda bucket: bucket.communicator.all_reduce(bucket.buffer))
    flat, fortran = np.ones((3, 4), F4), np.ones((3, 4), F4, order="F")
    for _ in range(4):
        flat[...] = fortran[...] = 1
        with flags_kept(flat, fortran), sync.backward():
            futures = [sync("a", flat), sync("b", fortran)]
            expect_locked(flat)
        assert all((future.result() == comm.world_size).all() for future in futures)


def live_in_buckets(comm: Any, _kit: str) -> None:
    """Memory that ranks share is not locked; what is copied into its bucket at once is the caller's at once."""
    parameters = {"a": ((SIZE,), "float32"), "b": ((3, 4), "float32")}
    sync = gs.AllreduceCallback("sum", comm, parameters=parameters, gradient_as_bucket_view=True)
    views = sync.gradient_buffers()
    elsewhere = np.ones((3, 4), F4)
    for _ in range(4):
        views["a"][...] = elsewhere[...] = 1
        with flags_kept(*views.values(), elsewhere), sync.backward():
            sync("a", views["a"])
            future = sync("b", elsewhere)
            elsewhere[...] = 7
        assert (views["a"] == comm.world_size).all()
        assert (future.result() == comm.world_size).all()


def stay_apart_on_a_gpu(comm: Any, _kit: str) -> None:
    """CuPy's arrays have no such flag."""
    import cupy

    gradient = cupy.ones(SIZE, F4)
    sync = gs.AllreduceCallback("sum", comm)
    for _ in range(3):
        gradient[...] = 1
        with sync.backward():
            future = sync("w", gradient)
        assert (future.result().get() == comm.world_size).all()


# -- In flight elsewhere -------------------------------------------------------------------------------------------


def hand_over_to_two_callbacks(comm: Any, _kit: str) -> None:
    first, second = (gs.AllreduceCallback(method, comm) for method in ("sum", "mean"))
    big = np.ones(2 * SIZE, F4)
    gradient, lower = big[:SIZE], big[SIZE:]
    for _ in range(3):
        gradient[...] = lower[...] = 1
        with flags_kept(big, gradient, lower):
            future = first("weights", gradient)
            for array in (gradient, gradient[3:], gradient[::2]):
                error = expect(gs.InvalidArgument, lambda array=array: second("other", array), "in flight")
                for part in (comm.label, "'other'", "'weights'", 'AllreduceCallback("sum")'):
                    assert part in str(error), (part, error)
            if comm.world_size > 1:
                expect(gs.InvalidArgument, lambda: gs.average_gradients([gradient], communicator=comm), "in flight")
            expect(gs.InvalidArgument, lambda: first("again", gradient), "shares memory with the gradient of 'weights'")
            expect(gs.InvalidArgument, lambda: first("weights", gradient), "handed over twice")
            other = second("other", lower)  # of the same buffer, but other memory
            frozen = second("frozen", _read_only())
            first.flush()
            second.flush()
            assert future.result() is gradient
            assert other.result() is lower
            assert (frozen.result() == 1).all()
        assert (gradient == comm.world_size).all()
        second("other", gradient)  # now it is not in flight any more
        second.flush()


def hand_over_a_base(comm: Any, _kit: str) -> None:
    """The whole buffer is handed over while a view of it is in flight in another callback: the latter is told."""
    for ends_first in ("view", "base"):
        of_view, of_base = gs.AllreduceCallback("sum", comm), gs.AllreduceCallback("sum", comm)
        big = np.ones(2 * SIZE, F4)
        view = big[:SIZE]
        with flags_kept(big, view):
            of_view("half", view)
            of_base("whole", big)
            if ends_first == "base":
                of_base.flush()
                of_view.flush()
            else:
                text = str(expect(gs.InvalidArgument, of_view.flush, "'half' is in flight already"))
                assert "'whole'" in text
                of_base.flush()
    big = np.ones(2 * SIZE, F4)
    view = big[:SIZE]
    of_base("whole", big)
    expect(gs.InvalidArgument, lambda: of_view("half", view), "'whole'")  # an older view, writeable
    of_base.flush()
    assert is_writeable(view)


# -- The ways out --------------------------------------------------------------------------------------------------


def _flush(sync: Any, _comm: Any) -> None:
    sync.flush()


def _raise(sync: Any, _comm: Any) -> None:
    with suppress(KeyError), sync.backward():
        raise KeyError("no such batch")


def _close(_sync: Any, comm: Any) -> None:
    comm.close()
    _destroy(_sync, comm)


def _abort(_sync: Any, comm: Any) -> None:
    comm.abort("enough")


def _destroy(_sync: Any, _comm: Any) -> None:
    with suppress(gs.InvalidArgument):  # gradients that were never reduced, where there are any
        gs.destroy_process_group()


def _refuse(sync: Any, _comm: Any) -> None:
    """A hand-over that fails by itself, in the middle of the step."""
    expect(gs.InvalidArgument, lambda: sync([], np.ones(2)), "hashable")
    expect(gs.InvalidArgument, lambda: sync("none", None), "None")
    expect(gs.UnsupportedDtype, lambda: sync("object", np.array([None])))
    sync.flush()


def _change_group(sync: Any, comm: Any) -> None:
    """The group ended; the callback finds that out."""
    comm.close()
    with suppress(gs.GradsyncError):
        sync.flush()


def _leave_in_done_callback(sync: Any, _comm: Any) -> None:
    def leave(_: Any) -> None:
        raise SystemExit(3)

    with suppress(SystemExit), sync.backward():
        sync("last", np.ones(1, F4)).add_done_callback(leave)


LOCAL_WAYS_OUT = {
    "flush": _flush,
    "exception": _raise,
    "close": _close,
    "abort": _abort,
    "refused": _refuse,
    "group changed": _change_group,
    "done-callback leaves": _leave_in_done_callback,
}
LAST_WAYS_OUT = {"destroy": _destroy, "close": _close, "abort": _abort}


def leave_by(comm: Any, seed: int, way: str) -> None:
    """Random gradients in random buckets, some of them known from steps before; then one way out."""
    chance = random.Random(seed)
    names = chance.sample(sorted(LAYOUTS), chance.randrange(1, 8))
    made = {name: LAYOUTS[name]() for name in names}
    threshold_bytes = chance.choice([1, 50, 200, 10**6])
    sync = gs.AllreduceCallback("sum", comm, threshold_bytes=threshold_bytes)
    with flags_kept(*[array for array, _ in made.values()]):
        for _ in range(chance.randrange(4)):
            with sync.backward():
                for name, (array, _) in made.items():
                    sync(name, array)
        futures = {name: sync(name, array) for name, (array, _) in made.items()}
        may_have_ended = way == "abort" and comm.world_size > 1  # by a faster rank, whose abort unlocks here, too
        for name, (array, is_locked) in made.items():
            if is_locked and not may_have_ended:
                is_done = futures[name].done()  # on a GPU it may be at any moment, and is_writeable then
                assert is_writeable(array) or not is_done, name
                assert not is_writeable(array) or futures[name].done(), name
        {**LOCAL_WAYS_OUT, **LAST_WAYS_OUT}[way](sync, comm)


def forget_the_callback(comm: Any, _kit: str) -> None:
    gradient = np.ones(SIZE, F4)
    sync = gs.AllreduceCallback("sum", comm)
    future = sync("w", gradient)
    expect_locked(gradient)
    del sync
    gc.collect()
    assert is_writeable(gradient)
    assert not future.done()
    assert "never reduced" in take_forgotten()[0]


def fail_together(comm: Any, _kit: str) -> None:
    """Errors that every rank gets; afterwards the next step is as ever."""
    gradients = {name: np.ones(SIZE, F4) for name in "abc"}

    def step(sync: Any, names: str) -> None:
        with sync.backward():
            for name in names:
                sync(name, gradients[name])

    for threshold_bytes in (1, 10**6):
        options: dict[str, Any] = {"threshold_bytes": threshold_bytes}
        sync = gs.AllreduceCallback("sum", comm, **options)
        with flags_kept(*gradients.values()):
            for _ in range(10 if comm.world_size > 1 else 0):
                # "a" may be launched already: a program that has caught the error can use it all the same.
                with flags_kept(*gradients.values()):
                    expect(gs.PlanMismatch, lambda sync=sync: step(sync, "abc" if comm.rank else "acb"))
            step(sync, "abc")
            known = dict.fromkeys(gradients, ((SIZE,), "float32"))
            told = gs.AllreduceCallback("sum", comm, parameters=known, **options)
            expect(gs.MissingGradient, lambda told=told: step(told, "ab"))
            step(told, "abc")
            raising = gs.AllreduceCallback("sum", comm, nonfinite="raise", **options)
            gradients["b"][0] = np.nan
            expect(gs.NonFiniteGradient, lambda raising=raising: step(raising, "abc"))
            gradients["b"][0] = 1


def fail_in_a_hook(comm: Any, _kit: str) -> None:
    gradient = np.ones(SIZE, F4)
    sync = gs.AllreduceCallback("sum", comm)
    sync.register_hook(lambda _bucket: "no buffer")
    with flags_kept(gradient):
        expect(gs.GradsyncError, lambda: _one_step(sync, gradient))


def _one_step(sync: Any, gradient: Any) -> None:
    with sync.backward():
        sync("w", gradient)


def lose_a_rank(comm: Any, _kit: str) -> None:
    """Rank 1 dies in the middle of a step."""
    gradient = np.ones(SIZE, F4)
    sync = gs.AllreduceCallback("sum", comm)
    _one_step(sync, gradient)
    if comm.rank == 1:
        os._exit(7)
    with flags_kept(gradient):
        expect((gs.RankFailed, gs.CommunicatorClosed), lambda: _one_step(sync, gradient))  # type: ignore[arg-type]


def fail_elsewhere(comm: Any, _kit: str) -> None:
    """Another rank aborts while gradients wait here; the program meets that in a collective of its own."""
    gradient = np.ones(SIZE, F4)
    sync = gs.AllreduceCallback("sum", comm)
    sync("w", gradient)
    if comm.rank == 1:
        comm.abort("enough")
    else:
        expect(gs.RankFailed, comm.barrier)
    assert is_writeable(gradient)


def use_in_the_next_step(comm: Any, _kit: str) -> None:
    """What writes with out= into the gradient that was reduced."""
    gradient = np.empty((3, 3), F4)
    sync = gs.AllreduceCallback("sum", comm)
    for step in range(4):
        np.matmul(np.eye(3, dtype=F4), np.full((3, 3), step, F4), out=gradient)
        with sync.backward():
            sync("w", gradient)
        assert (gradient == step * comm.world_size).all()


def fork_with_gradients_in_flight(comm: Any, _kit: str) -> None:
    """The child's copies are not for ever read-only."""
    gradient = np.ones(SIZE, F4)
    sync = gs.AllreduceCallback("sum", comm)
    sync("w", gradient)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if is_writeable(gradient) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    expect_locked(gradient)
    sync.flush()
