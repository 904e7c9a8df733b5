"""What the NCCL communicator must do when ranks differ, die or do not come; run inside rank processes."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from nccl_checks import Obstacle

import gradsync as gs
from contract import expect, wait_until
from gradsync import process_group
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.nccl import connect
from gradsync.communicators.nccl.library import Nccl
from kits import bring_to_rest

SECONDS = 30.0  # for what must come at all
SOON_SECONDS = 15.0  # the target is 1 s; a busy machine adds; whatever else could end a wait comes after 30 s


def client() -> Any:
    return process_group._client


def wait_until_told(kind: type[gs.GradsyncError] = gs.RankFailed) -> str:
    """Waits for the end of the generation, and returns what the server says of it.

    Closes the communicators, which tell the same to whoever closes them, once their watchers have heard it too.
    """
    told = str(expect(kind, lambda: client().get("nobody sets this", timeout_seconds=SECONDS)))
    world = gs.get_communicator()
    for close in (world._tree.close, world.close):
        with contextlib.suppress(gs.GradsyncError):
            close()
    return told


# -- Ranks that differ ------------------------------------------------------------------------------------------------


def step(callback: Any, order: str) -> list[Any]:
    """Hands over gradients named by letters, one bucket each."""
    with callback.backward():
        return [callback(name, cupy.full(10, i + 1.0)) for i, name in enumerate(order)]


def settled(comm: Any) -> Any:
    """Returns a callback after steps that were equal on all ranks."""
    callback = gs.AllreduceCallback("sum", comm, threshold_bytes=1)
    for _ in range(3):
        step(callback, "abcde")
    return callback


def stray_alone(comm: Any, collective: str) -> str:
    """Rank 1 does something else: all ranks are told before data moves, and can go on."""
    callback = settled(comm)
    array = cupy.ones(3)
    if comm.rank != 1:
        error = expect(gs.PlanMismatch, lambda: step(callback, "abcde"))
    elif collective == "bucket":
        error = expect(gs.PlanMismatch, lambda: step(callback, "abced"))
    else:
        error = expect(gs.PlanMismatch, lambda: comm.all_reduce(array))
    assert set(error.descriptions) == set(error.places) == set(range(comm.world_size))
    assert all(place.startswith(f"{__file__}:") for place in error.places.values())
    assert (array.get() == 1).all()
    assert float(step(callback, "abcde")[0].result()[0]) == comm.world_size
    return str(error).partition(":")[2]


def stray_together(comm: Any) -> str:
    """Every rank does something new, and not the same."""
    callback = settled(comm)
    order = ("abcd" + "xyz"[comm.rank]) if comm.rank < 3 else "abcde"
    error = expect(gs.PlanMismatch, lambda: step(callback, order))
    for _ in range(2):
        assert float(step(callback, "abcde")[0].result()[0]) == comm.world_size
    return str(error).partition(":")[2]


# -- Collectives that miss a rank ------------------------------------------------------------------------------------


def agree_and_not_come(comm: Any) -> None:
    """From now on this rank agrees on collectives, and its GPU never comes to them, as behind a kernel that hangs."""
    comm._backend._nccl.call = lambda *_: None


def launch_what_the_others_do_not(comm: Any) -> Any:
    """Returns the future of a bucket to which only the GPU of rank 0 comes; None on the other ranks."""
    callback = gs.AllreduceCallback("sum", comm)
    step(callback, "a")
    if comm.rank == 0:
        return step(callback, "a")[0]
    agree_and_not_come(comm)
    step(callback, "a")
    return None


def await_failure(future: Any) -> tuple[Any, float]:
    """Returns what ended a bucket, and after how many seconds."""
    ended = threading.Event()
    began = time.monotonic()
    future.add_done_callback(lambda _: ended.set())
    assert ended.wait(SECONDS)
    return future.exception(), time.monotonic() - began


def die_beside_a_stuck_collective(comm: Any, victim_is_root: bool) -> float:
    """Rank 1 dies while rank 0 waits for it, or the other way round: the root serves the unique id."""
    callback = gs.AllreduceCallback("sum", comm)
    step(callback, "a")
    survives = comm.rank == int(victim_is_root)
    if not survives:
        agree_and_not_come(comm)
        step(callback, "a")
        client().get("launched", timeout_seconds=SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)
    future = step(callback, "a")[0]
    client().set("launched", b"")
    error, seconds = await_failure(future)
    assert isinstance(error, gs.RankFailed), error
    assert error.rank == 1 - comm.rank
    expect(gs.RankFailed, future.result)
    expect(gs.CommunicatorClosed, comm.barrier)
    return seconds


def miss_the_deadline(comm: Any) -> tuple[str, float]:
    future = launch_what_the_others_do_not(comm)
    if future is None:
        return wait_until_told(gs.CollectiveTimeout), 0.0
    error, seconds = await_failure(future)
    assert isinstance(error, gs.CollectiveTimeout), error
    return str(error), seconds


def miss_the_deadline_in_a_call_that_blocks(comm: Any, collective: str) -> str:
    """With CUDA_LAUNCH_BLOCKING=1, as NCCL's errors advise: the host itself waits for the other rank."""
    callback, array = gs.AllreduceCallback("sum", comm, threshold_bytes=1), cupy.ones(3)

    def reduce() -> Any:
        return callback("a", array) if collective == "bucket" else comm.all_reduce(array)

    reduce()
    callback.flush()
    if comm.rank != 0:
        agree_and_not_come(comm)
        reduce()
        return wait_until_told(gs.CollectiveTimeout)
    error = expect(gs.CollectiveTimeout, reduce)
    expect(gs.CommunicatorClosed, comm.barrier)
    return str(error)


def miss_a_rank_at_first_contact(comm: Any) -> str:
    """All agree on the first collective. NCCL connects the ranks then, while the host waits; rank 1 does not come."""

    def never_come(*_: Any) -> None:
        wait_until_told(gs.CollectiveTimeout)
        raise gs.CommunicatorClosed("told")

    if comm.rank == 1:
        comm._backend._nccl.call = never_come
    kinds = (gs.CollectiveTimeout, gs.CommunicatorClosed)
    error = expect(kinds, lambda: comm.all_reduce(cupy.ones(3)))
    expect(gs.CommunicatorClosed, comm.barrier)
    return str(error)


def read_what_misses_a_rank(comm: Any) -> None:
    future = launch_what_the_others_do_not(comm)
    if future is None:
        wait_until_told(gs.CollectiveTimeout)
    else:
        expect(gs.CollectiveTimeout, future.numpy)


def miss_the_deadline_of_a_comparison(comm: Any) -> str:
    if comm.rank == 1:
        return wait_until_told(gs.CollectiveTimeout)
    error = expect(gs.CollectiveTimeout, lambda: comm.all_reduce(cupy.ones(3)))
    assert error.missing_ranks == (1,)
    expect(gs.CommunicatorClosed, comm.barrier)
    return str(error)


def close_early(comm: Any) -> str:
    if comm.rank == 1:
        comm.close()
        with contextlib.suppress(gs.RankFailed):
            client().get("done", timeout_seconds=SECONDS)
        return ""
    error = expect(gs.RankFailed, comm.barrier)
    assert error.rank == 1
    with contextlib.suppress(gs.RankFailed):
        client().set("done", b"")
    return str(error)


def abort_a_stuck_collective(comm: Any) -> str:
    future = launch_what_the_others_do_not(comm)
    if future is None:
        return wait_until_told()
    assert not future.done()
    began = time.monotonic()
    comm.abort("enough")
    assert time.monotonic() - began < SOON_SECONDS
    assert future.done()
    assert isinstance(future.exception(), gs.CommunicatorClosed)
    expect(gs.CommunicatorClosed, future.result, "enough")
    expect(gs.CommunicatorClosed, comm.barrier, "enough")
    gs.destroy_process_group()
    assert time.monotonic() - began < SOON_SECONDS
    return ""


def abort_beside_a_wait_at_the_server(comm: Any, what: str) -> None:
    """Rank 1 waits for what rank 0 does not come to; another thread of its own aborts."""

    def abort() -> None:
        wait_until(lambda: bool(client()._connection._pending))
        comm.abort("enough")

    if comm.rank == 0:
        assert "enough" in wait_until_told()
        return
    began = time.monotonic()
    aborting = threading.Thread(target=abort)
    aborting.start()
    expect(gs.CommunicatorClosed, (lambda: comm.new_group([0, 1])) if what == "new_group" else comm.barrier, "enough")
    aborting.join()
    assert time.monotonic() - began < SOON_SECONDS


def close_before_a_group(comm: Any) -> None:
    if comm.rank == 1:
        comm.close()
        client().set("closed", b"")
        with contextlib.suppress(gs.RankFailed):
            client().get("done", timeout_seconds=SECONDS)
        return
    client().get("closed", timeout_seconds=SECONDS)
    began = time.monotonic()
    assert expect(gs.RankFailed, lambda: comm.new_group([0, 1]), "rank 1 closed the communicator").rank == 1
    assert time.monotonic() - began < SOON_SECONDS
    client().set("done", b"")
    comm.close()


def abort_because_of_another_rank(comm: Any) -> None:
    if comm.rank == 1:
        comm.abort("rank 2 told me nonsense", culprit=2)
        return
    assert "nonsense" in wait_until_told()
    assert expect(gs.RankFailed, client().check).rank == 2


def close_beside_a_stuck_collective(comm: Any) -> str:
    """What cannot end any more ends with an error, never with undefined values."""
    from gradsync.communicators.nccl import nccl_backend as nccl

    nccl._DRAIN_SECONDS = 0.3
    future = launch_what_the_others_do_not(comm)
    if future is None:
        return wait_until_told()
    expect(gs.CollectiveTimeout, comm.close, "did not end within 0.3 s")
    return str(expect(gs.CollectiveTimeout, future.result))


def keep_what_queued_work_writes_to(comm: Any, kind: str) -> None:
    """ncclCommAbort waits for NCCL's own work, and not for the copy that is queued behind it."""

    def make() -> Any:
        return np.ones(4000) if kind == "host" else cupy.ones((400, 10)).T  # a layout that is written back

    comm.asynchronous.all_reduce(make()).result()
    if comm.rank != 0:
        agree_and_not_come(comm)
        comm.asynchronous.all_reduce(make()).result()
        wait_until_told()
        return
    obstacle, bring_back = Obstacle(), comm._backend.bring_back

    def bring_back_late(flat: Any, native: Any, launch: Any) -> None:
        obstacle.put_on(cupy.cuda.get_current_stream())
        bring_back(flat, native, launch)

    comm._backend.bring_back = bring_back_late
    array = make()
    future = comm.asynchronous.all_reduce(array)
    gone = weakref.ref(array)
    del array
    comm.abort("enough")
    wait_until(comm._backend._nccl.has_ended.is_set)
    del future
    comm._backend._last = None
    gc.collect()
    fresh_on_device = [cupy.full((400, 10), -7.0) for _ in range(20)]
    fresh_on_host = [cupy.cuda.alloc_pinned_memory(4000 * 8) for _ in range(20)]
    values = [np.frombuffer(pinned, np.float64, 4000) for pinned in fresh_on_host]
    for value in values:
        value[:] = -7
    obstacle.lift()
    bring_to_rest(comm)
    assert all((array.get() == -7).all() for array in fresh_on_device)
    assert all((value == -7).all() for value in values)
    wait_until(lambda: gone() is None)


def close_between_a_launch_that_fails_and_its_communicator(comm: Any) -> None:
    """The watcher has failed what runs, and not yet the communicator: it cannot be destroyed in order any more."""
    if launch_what_the_others_do_not(comm) is None:
        client().get("launched", timeout_seconds=SECONDS)
        comm.abort("enough")
        return
    end_running, have_failed, destroyed = comm._backend._watched._end_running, threading.Event(), []

    def fail_and_pause(error: BaseException) -> None:
        end_running(error)
        have_failed.set()
        time.sleep(0.5)  # as where the machine is busy: time enough for what must not happen

    comm._backend._watched._end_running = fail_and_pause
    comm._backend._nccl.destroy = lambda: destroyed.append(comm)
    with contextlib.suppress(gs.RankFailed):  # it is on its way, and the other one may be faster than the answer
        client().set("launched", b"")
    assert have_failed.wait(SECONDS)
    expect(gs.RankFailed, comm.close, "enough")
    assert destroyed == []


# -- Beginnings that fail -------------------------------------------------------------------------------------------


def _refuse(*args: Any, **options: Any) -> Any:
    raise gs.BackendUnavailable("no GPU for me")


def _die(*args: Any, **options: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _never_come(*args: Any, **options: Any) -> Any:
    wait_until_told()
    raise gs.BackendUnavailable("told")


def begin_without_a_peer(comm: Any, where: str, how: str, seconds: float) -> str:
    """Rank 1 does something else in place of a part of the way to the communicator."""
    gs.destroy_process_group()
    if comm.rank == 1:
        replacement: Callable[..., Any] = {"refuse": _refuse, "die": _die, "stay away": _never_come}[how]
        setattr(Nccl if hasattr(Nccl, where) else connect, where, replacement)
    began = time.monotonic()
    options: dict[str, Any] = {"timeout_seconds": seconds, "allow_shared_gpu": True}
    error = expect(gs.GradsyncError, lambda: gs.init_process_group("nccl", **options))
    assert time.monotonic() - began < seconds + SOON_SECONDS
    assert not gs.is_initialized()
    return f"{type(error).__name__}: {error}"


def begin_without_a_thread(comm: Any, thread: str) -> str:
    """Rank 1 cannot start a thread that its communicator needs: NCCL's communicator ends, and rank 0 learns of it.

    Afterwards rank 1 can start the thread, and the ranks begin again.
    """
    gs.destroy_process_group()
    wait_until(lambda: not watchers())
    made: list[Any] = []  # keeps CuPy's communicator alive, as a program that keeps the error does
    start, initialize = threading.Thread.start, cupy.cuda.nccl.NcclCommunicator.__init__

    def start_or_refuse(self: threading.Thread) -> None:
        if self.name == thread:
            raise RuntimeError("can't start new thread")
        start(self)

    def initialize_and_note(self: Any, *arguments: Any) -> None:
        initialize(self, *arguments)
        made.append(self)

    def begin() -> None:
        gs.init_process_group("nccl", timeout_seconds=SECONDS, allow_shared_gpu=True).barrier()

    began = time.monotonic()
    cupy.cuda.nccl.NcclCommunicator.__init__ = initialize_and_note
    if comm.rank == 1:
        threading.Thread.start = start_or_refuse  # type: ignore[method-assign]
        error = expect(RuntimeError, begin)
        threading.Thread.start = start  # type: ignore[method-assign]
    else:
        error = expect(gs.RankFailed, begin)
    cupy.cuda.nccl.NcclCommunicator.__init__ = initialize
    wait_until(lambda: all(not each.comm for each in made))
    assert made
    assert time.monotonic() - began < SOON_SECONDS
    gs.destroy_process_group()
    with gs.init_process_group("nccl", allow_shared_gpu=True) as again:
        again.barrier()
        assert watchers() == 1
    return str(error)


def begin_again(comm: Any) -> None:
    for generation in range(3):
        array = cupy.full(3, comm.rank + generation, np.float32)
        comm.all_reduce(array)
        assert array.get()[0] == sum(range(comm.world_size)) + comm.world_size * generation
        gs.destroy_process_group()
        expect(gs.CommunicatorClosed, comm.barrier)
        comm = gs.init_process_group("nccl", allow_shared_gpu=True)
    gs.destroy_process_group()


# -- Endings ----------------------------------------------------------------------------------------------------------


def watchers() -> int:
    return sum(thread.name == "gradsync-nccl-watcher" for thread in threading.enumerate())


def forget_without_closing(comm: Any) -> None:
    """A communicator that is collected ends by itself, its threads too; the world's goes on."""
    before = watchers()
    for number in range(3):
        backend = connect.connect(
            client(), process_group._settings._replace(allow_shared_gpu=True), f"forgotten {number}"
        )
        forgotten = Communicator(backend)
        del backend
        ended = forgotten._backend._nccl.has_ended
        forgotten.barrier()
        comm.barrier()
        del forgotten
        # The watcher has it in its hands for moments at a time.
        wait_until(lambda e=ended: gc.collect() >= 0 and e.is_set())
    wait_until(lambda: watchers() <= before)
    comm.barrier()


def collect_at_calls(comm: Any, stride: int) -> int:
    """The garbage collector may strike anywhere, also where a thread has just taken a lock to send a message."""
    gc.disable()
    number, call, struck = 0, 0, True

    def strike(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal call, forgotten
        call += event == "call"
        if call == number and forgotten:
            forgotten = []
            gc.collect()

    while struck:
        forgotten = [comm.split(color=0)]
        comm.barrier()
        gc.freeze()  # what is looked at then is little
        number, call, struck = number + stride, 0, False
        sys.setprofile(strike)
        comm.objects.all_gather(number)
        sys.setprofile(None)
        struck = any(comm.objects.all_gather(not forgotten))
    return number


def abort_what_has_failed(comm: Any) -> None:
    """Two ranks abort for reasons of their own: who hears of the other's first need not hear of it again."""
    group = comm.split(color=0)
    comm.barrier()
    if comm.rank == 1:
        wait_until(lambda: comm.closed and group.closed)  # by their watchers
        group.abort("enough, too")
        group.close()
        comm.close()
    else:
        group.abort("enough")


def abort_beside_a_call_that_does_not_return(comm: Any) -> None:
    """A call of NCCL's on the host may block for ever; the abort does not wait for it."""
    if comm.rank == 1:
        expect(gs.RankFailed, comm.barrier)
        return
    is_in_it, is_over = threading.Event(), threading.Event()

    def block() -> None:
        with comm._backend._nccl._calling:
            is_in_it.set()
            is_over.wait()

    threading.Thread(target=block, daemon=True).start()
    is_in_it.wait()
    comm.abort("enough")
    wait_until(comm._backend._nccl.has_ended.is_set)
    is_over.set()


def abort_while_the_driver_is_held(comm: Any) -> None:
    """Another thread may hold the driver's lock, as cudaFree does that waits for a hung kernel; abort ends that."""
    if comm.rank == 1:
        expect(gs.RankFailed, comm.barrier)
        return
    lifted, use = threading.Event(), cupy.cuda.Device.use

    def use_late(device: Any) -> None:
        if threading.current_thread().name == "gradsync-nccl-end":
            lifted.wait()
        use(device)

    cupy.cuda.Device.use = use_late
    comm.abort("enough")
    wait_until(comm._backend._nccl.has_ended.is_set)
    lifted.set()


def fork_and_use(comm: Any) -> str:
    array = cupy.ones(3)
    comm.all_reduce(array)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        error = expect(gs.CommunicatorClosed, lambda: comm.all_reduce(np.ones(3)))
        comm.close()
        comm.abort("in the child")
        gs.destroy_process_group()
        os.write(write, str(error).encode())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    text = os.read(read, 1000).decode()
    os.close(read)
    os.close(write)
    comm.all_reduce(array)
    assert array.get()[0] == comm.world_size**2
    return text
