"""NCCL and failures: each rank gets an error that names the rank and the cause, and nothing hangs.

A collective that misses a rank never ends by itself, on a GPU as on the fake with HANGS.
"""

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
import weakref
from functools import partial

import numpy as np
import pytest

import gradsync as gs
from backends.on_cuda import HANGS, assert_all, full, hear, meet, side_stream, tell, total
from bucketing.reference import Heard
from commands import wait_until
from obstacle import Obstacle

DEADLINE = {"collective_timeout_seconds": 2.5}
stuck = pytest.mark.ranks(2, on=("fake",), fresh=True, environment=HANGS)
stuck_with_deadline = pytest.mark.ranks(2, on=("fake",), fresh=True, environment=HANGS, options=DEADLINE)


def communicator_class():
    from cupy.cuda import nccl

    return nccl.NcclCommunicator


def agree_and_not_come():
    """From now on this rank agrees on collectives, and its GPU never comes to them, as behind a kernel that hangs."""
    communicator_class().allReduce = lambda *_: None


def step(callback, order="a"):
    """Hands over gradients named by letters, one bucket each."""
    with callback.backward():
        return [callback(name, full(index + 1.0, 10)) for index, name in enumerate(order)]


def reduce_without_rank_1(comm, folder):
    """The future of a bucket to which only the GPU of rank 0 comes."""
    callback = gs.AllreduceCallback("sum", comm)
    step(callback)[0].numpy()
    meet(folder, comm, "the last collective of both has ended")
    if comm.rank == 1:
        agree_and_not_come()
    future = step(callback)[0]
    meet(folder, comm, "both have launched")
    return future


def told(call, *arguments):
    """For a thread: the error with which a call ends is none of the test's."""
    with contextlib.suppress(gs.GradsyncError):
        call(*arguments)


def failure_of(comm):
    """What the end of the communicator is told as to a rank that waits for nothing."""
    wait_until(lambda: comm.closed)
    with pytest.raises(gs.GradsyncError) as raised:
        comm.barrier()
    return raised.value


# -- Ranks that differ ------------------------------------------------------------------------------------------------


@pytest.mark.ranks(on={"fake": (3,), "gpu": (2,)}, environment=HANGS)
def test_steps_that_differ_are_told_before_data_move_and_the_ranks_go_on(comm):
    callback = gs.AllreduceCallback("sum", comm, threshold_bytes=1)
    ranks = set(range(comm.world_size))
    for last in ("exe", "xyz"):  # one rank differs, all do
        for _ in range(3):
            assert_all(step(callback, "abcde")[1].result(), 2 * comm.world_size)
        with pytest.raises(gs.PlanMismatch) as raised:
            step(callback, "abcd" + last[comm.rank])
        assert not raised.value.broken
        assert set(raised.value.descriptions) == set(raised.value.places) == ranks
        assert all(place.startswith(__file__) for place in raised.value.places.values())
    assert_all(step(callback, "abcde")[1].result(), 2 * comm.world_size)


# -- Collectives that miss a rank -------------------------------------------------------------------------------------


@pytest.mark.ranks(on={"fake": (2,), "gpu": (2,)}, fresh=True, environment=HANGS, options=DEADLINE)
def test_every_rank_is_told_when_a_collective_reaches_its_deadline(comm):
    """Rank 1 has launched a bucket, and a collective of a host array, behind work that does not end."""
    callback = gs.AllreduceCallback("sum", comm)
    step(callback)[0].numpy()
    array = full(1, 10)
    stream = side_stream()
    obstacle = Obstacle(stream)
    if comm.rank == 0:
        obstacle.lift()
    with obstacle:
        with stream:
            bucket = callback("a", array)
            callback.flush()
            on_host = comm.asynchronous.all_reduce(np.ones(10))
        for future in (bucket, on_host):
            wait_until(future.done)
            assert isinstance(future.exception(), gs.CollectiveTimeout)
            with pytest.raises(gs.CollectiveTimeout):
                future.result()
        with pytest.raises(gs.CommunicatorClosed):
            comm.barrier()


@pytest.mark.ranks(2, on=("fake",), fresh=True, options=DEADLINE, environment={"CUDA_LAUNCH_BLOCKING": "1", **HANGS})
def test_the_deadline_of_a_call_that_blocks_the_host(comm):
    """With CUDA_LAUNCH_BLOCKING=1, as hints at failed GPUs advise: the host itself waits for the other rank."""
    callback = gs.AllreduceCallback("sum", comm)
    step(callback)
    if comm.rank == 1:
        agree_and_not_come()
    with pytest.raises(gs.CollectiveTimeout):
        step(callback)
        raise failure_of(comm)


@pytest.fixture
def noticed(tmp_path):
    """A file that appears once the server, which runs in this process, says that a rank is waited for."""

    class Handler(logging.Handler):
        def emit(self, record):
            text = record.getMessage()
            if " waited " in text:
                (tmp_path / "noticed").write_text(text)

    handler = Handler()
    logging.getLogger("gradsync").addHandler(handler)
    yield tmp_path / "noticed"
    logging.getLogger("gradsync").removeHandler(handler)


@pytest.mark.slow  # after 5 s, which nothing can shorten
@stuck
@pytest.mark.parametrize("where", ["kernel", "call of NCCL"])
def test_who_is_waited_for_is_said_long_before_the_deadline(comm, noticed, where):
    """Whether the host is blocked in a call, or does something else."""
    if where == "kernel":
        comm.all_reduce(full(1))  # the first contact
    if comm.rank == 1:
        wait_until(noticed.exists)
        comm.abort("seen")
    else:
        with pytest.raises(gs.RankFailed):
            comm.all_reduce(full(1))
            raise failure_of(comm)
        text = noticed.read_text()
        assert text.startswith("gradsync: rank 0 has waited 5")
        assert f"all_reduce(sum) #{2 if where == 'kernel' else 1}" in text
        assert "for rank 1" in text


@stuck_with_deadline
def test_the_deadline_of_a_first_contact(comm):
    """NCCL connects the ranks at their first collective, while the host waits. An abort may not help: it comes last."""
    from gradsync.rendezvous.client import RendezvousClient

    ends, report = note_ends(), RendezvousClient.report_stuck

    def noted(*arguments):
        ends.append("report")
        report(*arguments)

    RendezvousClient.report_stuck = noted
    if comm.rank == 1:
        agree_and_not_come()
    with pytest.raises(gs.CollectiveTimeout):
        comm.all_reduce(full(1, 3))
        raise failure_of(comm)
    wait_until(lambda: "abort" in ends)
    assert ends == (["abort"] if comm.rank == 1 else ["report", "abort"])


@pytest.mark.ranks(3, on=("fake",), fresh=True, environment=HANGS, options=DEADLINE)
def test_a_message_that_misses_its_sender_names_it_to_all(comm):
    if comm.rank == 0:
        with pytest.raises(gs.CollectiveTimeout) as raised:
            comm.recv(full(0, 3), 2)
        assert raised.value.missing_ranks == (2,)
    else:
        assert failure_of(comm).missing_ranks == (2,)


def lose_a_rank_beside_a_stuck_collective(comm, folder, victim):
    callback = gs.AllreduceCallback("sum", comm)
    step(callback)[0].numpy()
    meet(folder, comm, "the last collective of both has ended")
    if comm.rank == victim:
        agree_and_not_come()
        step(callback)
        hear(folder, "launched")
        os.kill(os.getpid(), signal.SIGKILL)
    future = step(callback)[0]
    tell(folder, "launched")
    with pytest.raises(gs.RankFailed) as raised:
        future.numpy()
        raise failure_of(comm)
    assert raised.value.rank == victim
    assert future.exception().rank == victim


@pytest.mark.ranks(2, on=("fake",), environment=HANGS, ends={1: -signal.SIGKILL})
def test_a_rank_that_dies_beside_a_stuck_collective_is_named(comm, tmp_path):
    lose_a_rank_beside_a_stuck_collective(comm, tmp_path, 1)


@pytest.mark.ranks(2, on=("fake",), environment=HANGS, ends={0: -signal.SIGKILL})
def test_so_is_rank_0_which_made_the_unique_id(comm, tmp_path):
    lose_a_rank_beside_a_stuck_collective(comm, tmp_path, 0)


@pytest.mark.ranks(2, on=("fake",), fresh=True)
@pytest.mark.parametrize("what", ["message", "group"])  # a collective: the contract
def test_a_rank_that_has_closed_is_named_to_who_still_needs_it(comm, tmp_path, what):
    meet(tmp_path, comm, "both have begun")
    if comm.rank == 1:
        comm.close()
        tell(tmp_path, "closed")
        hear(tmp_path, "failed")
        return
    hear(tmp_path, "closed")
    with pytest.raises(gs.RankFailed) as raised:
        comm.recv(full(0, 3), 1) if what == "message" else comm.new_group([0, 1])
    assert raised.value.rank == 1
    tell(tmp_path, "failed")


# -- Aborts -----------------------------------------------------------------------------------------------------------


@stuck
def test_an_abort_ends_a_stuck_collective_at_once(comm, tmp_path):
    future = reduce_without_rank_1(comm, tmp_path)
    if comm.rank == 1:
        error = failure_of(comm)
        assert isinstance(error, gs.RankFailed)
        assert error.rank == 0
        return
    assert not future.done()
    comm.abort("enough")
    assert future.done()
    assert isinstance(future.exception(), gs.CommunicatorClosed)
    for call in (future.result, comm.barrier):
        with pytest.raises(gs.CommunicatorClosed):
            call()
    gs.destroy_process_group()


@stuck
def test_another_thread_may_abort_the_making_of_a_group(comm, tmp_path):
    meet(tmp_path, comm, "both have begun")
    if comm.rank == 0:
        assert isinstance(failure_of(comm), gs.RankFailed)
        return
    threading.Timer(0.1, comm.abort, ["enough"]).start()
    with pytest.raises(gs.CommunicatorClosed):
        comm.new_group([0, 1])


@pytest.mark.ranks(2, on=("fake",), fresh=True)
def test_two_ranks_abort_for_reasons_of_their_own(comm, tmp_path):
    """Who has heard of the other's first need not hear of it again."""
    group = comm.split(color=0)
    meet(tmp_path, comm, "both have the group")
    if comm.rank == 1:
        wait_until(lambda: comm.closed and group.closed)
        group.abort("enough, too")
        group.close()
        comm.close()
    else:
        group.abort("enough")


@stuck
@pytest.mark.parametrize("held", ["a call of NCCL", "the driver"])
def test_an_abort_waits_for_no_call_that_does_not_return(comm, tmp_path, held):
    """Another thread may be in NCCL for ever, or hold the driver's lock, as cudaFree does beside a hung kernel."""
    import cupy

    comm.barrier()
    meet(tmp_path, comm, "both are ready")
    if comm.rank == 1:
        with pytest.raises(gs.RankFailed):
            comm.barrier()
        return
    lifted, is_in_it, aborted = threading.Event(), threading.Event(), threading.Event()
    abort, use = communicator_class().abort, cupy.cuda.Device.use

    def block(*_):
        is_in_it.set()
        lifted.wait()

    def noted(raw):
        aborted.set()
        abort(raw)

    communicator_class().abort = noted
    if held == "the driver":
        cupy.cuda.Device.use = block
    else:
        communicator_class().allGather = block
        threading.Thread(target=comm.barrier, daemon=True).start()
        is_in_it.wait()
    comm.abort("enough")
    assert aborted.wait(30)
    cupy.cuda.Device.use = use
    lifted.set()


@pytest.mark.ranks(2, on=("fake",), fresh=True)
def test_an_abort_first_makes_a_blocked_call_return_where_nccl_can(comm):
    """By ncclCommRevoke: the memory that the call uses is freed by ncclCommAbort."""
    from gradsync.communicators.nccl import library

    comm.barrier()
    if comm.rank == 1:
        failure_of(comm)
        return
    events, is_in_it, revoked, aborted = [], threading.Event(), threading.Event(), threading.Event()
    abort = communicator_class().abort

    def blocked(*_):
        is_in_it.set()
        revoked.wait()
        events.append("the call has returned")

    def revoke(communicator, flags):
        events.append((communicator, flags))
        threading.Timer(0.2, revoked.set).start()
        return 0

    def noted(raw):
        events.append("abort")
        abort(raw)
        aborted.set()

    handle = comm._backend._nccl._raw.comm
    communicator_class().allReduce, communicator_class().abort = blocked, noted
    library._nccl_function = lambda name: revoke if name == "ncclCommRevoke" else None
    thread = threading.Thread(target=partial(told, comm.all_reduce, full(1)))
    thread.start()
    is_in_it.wait()
    comm.abort("enough")
    assert aborted.wait(30)
    assert events == [(handle, 0), "the call has returned", "abort"]
    thread.join()


@stuck
@pytest.mark.parametrize("kind", ["device", "host"])
def test_memory_that_queued_work_writes_to_is_kept_after_an_abort(comm, tmp_path, kind):
    """ncclCommAbort ends NCCL's own work, and not the copy of the result that is queued behind it."""
    import cupy

    def make():
        return np.ones(4000) if kind == "host" else cupy.ones((400, 10)).T  # a layout that is written back

    comm.asynchronous.all_reduce(make()).wait()
    meet(tmp_path, comm, "both have reduced")
    if comm.rank == 1:
        agree_and_not_come()
        with pytest.raises(gs.RankFailed):
            comm.asynchronous.all_reduce(make()).wait()
            raise failure_of(comm)
        return
    obstacles, all_reduce, abort = [], communicator_class().allReduce, communicator_class().abort
    aborted = threading.Event()

    def then_obstacle(raw, *arguments):
        all_reduce(raw, *arguments)
        obstacles.append(Obstacle(cupy.cuda.get_current_stream()))

    def noted(raw):
        abort(raw)
        aborted.set()

    communicator_class().allReduce, communicator_class().abort = then_obstacle, noted
    array = make()
    future = comm.asynchronous.all_reduce(array)
    gone = weakref.ref(array)
    del array
    comm.abort("enough")
    aborted.wait()
    del future
    gc.collect()
    fresh = [cupy.full((400, 10), -7.0) for _ in range(20)]
    pinned = [cupy.cuda.alloc_pinned_memory(4000 * 8) for _ in range(20)]
    on_host = [np.frombuffer(memory, np.float64, 4000) for memory in pinned]
    for values in on_host:
        values[:] = -7
    for obstacle in obstacles:
        obstacle.lift()
    cupy.cuda.Device().synchronize()
    for values in (*fresh, *on_host):
        assert_all(values, -7)
    del comm  # the communicator remembers its last collective
    wait_until(lambda: gc.collect() >= 0 and (kind == "host" or gone() is None))


@pytest.mark.slow  # 10 s: how long close() waits
@stuck
def test_closing_beside_a_stuck_collective_fails_its_futures(comm, tmp_path):
    future = reduce_without_rank_1(comm, tmp_path)
    if comm.rank == 1:
        assert isinstance(failure_of(comm), gs.GradsyncError)
        return
    with Heard() as lines:
        comm.close()
    assert any("CollectiveTimeout" in line for line in lines)
    with pytest.raises(gs.CollectiveTimeout):
        future.result()


# -- Errors of NCCL and of the GPU ------------------------------------------------------------------------------------


@pytest.mark.ranks(1, on=("fake",))
def test_errors_of_nccl_have_its_code_and_name(comm):
    """All codes: tests/real_cupy/test_library.py. CuPy's own error does not know the last ones."""
    from cupy.cuda import nccl

    for error, code, name in (
        (nccl.NcclError(5), 5, "ncclInvalidUsage"),
        (KeyError(7), 7, "ncclInProgress"),
        (KeyError(8), 8, "ncclTimeout"),
    ):

        def refuse(*_, error=error):
            raise error

        group = comm.new_group([0])
        with pytest.MonkeyPatch.context() as patch, pytest.raises(gs.NcclError) as raised:
            patch.setattr(communicator_class(), "allReduce", refuse)
            group.all_reduce(full(1, 3))
        assert (raised.value.code, raised.value.name) == (code, name)
        with pytest.raises(gs.CommunicatorClosed):
            group.barrier()


@pytest.mark.ranks(2, on=("fake",), fresh=True)
@pytest.mark.parametrize("how", ["refuses a call", "fails later", "GPU"])
def test_the_other_ranks_are_told_whose_nccl_or_gpu_has_failed(comm, tmp_path, how):
    from cupy.cuda import Stream, nccl

    comm.barrier()
    array, producer = full(1, 3), side_stream()
    with Obstacle(producer):
        with producer:
            future = comm.asynchronous.all_reduce(array)
        meet(tmp_path, comm, "both have launched")
        if comm.rank == 1:
            if how == "refuses a call":
                comm.all_reduce(array)
            error = failure_of(comm)
            assert isinstance(error, gs.RankFailed)
            assert error.rank == 0
            return

        def fail(*_):
            raise nccl.NcclError(4)

        if how == "refuses a call":
            communicator_class().allReduce = fail
            with pytest.raises(gs.NcclError) as raised:
                comm.all_reduce(array)
            assert raised.value.code == 4
            with pytest.raises(gs.CommunicatorClosed):
                future.result()
            return
        if how == "fails later":
            communicator_class().check_async_error = fail
            wait_until(future.done)
        else:
            Stream(non_blocking=True).launch_host_func(fail, None)
            wait_until(future.done)
        with pytest.raises(gs.NcclError) as raised:
            future.result()
        assert raised.value.code == (1 if how == "GPU" else 4)


@pytest.mark.ranks(2, on=("fake",), fresh=True)
def test_whatever_ends_a_group_of_calls_leaves_none_open(comm):
    from cupy.cuda import nccl

    source = full(1, 10)
    comm.all_to_all(source)

    def interrupt(*_):
        raise KeyboardInterrupt

    if comm.rank == 1:
        with pytest.raises(gs.RankFailed):
            comm.all_to_all(source)
            raise failure_of(comm)
        return
    communicator_class().send = interrupt
    with pytest.raises(KeyboardInterrupt):
        comm.all_to_all(source)
    with pytest.raises(nccl.NcclError):
        nccl.groupEnd()
    comm.abort("a call was interrupted")


# -- Beginnings -------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, on=("fake",), environment=HANGS)
@pytest.mark.parametrize("how", ["has no such device", "fails in ncclCommInitRank"])
def test_a_rank_that_cannot_begin_is_named_and_the_ranks_may_try_again(rank, how):
    from cupy.cuda import nccl

    init, device = communicator_class().__init__, None

    def fail(*_):
        raise nccl.NcclError(2)

    if rank == 1 and how == "has no such device":
        device = "cuda:99"
    elif rank == 1:
        communicator_class().__init__ = fail
    own = gs.BackendUnavailable if how == "has no such device" else gs.NcclError
    with pytest.raises(own if rank == 1 else gs.RankFailed) as raised:
        gs.init_process_group("nccl", device=device, timeout_seconds=60)
    assert rank == 1 or raised.value.rank == 1
    assert not gs.is_initialized()
    communicator_class().__init__ = init
    with gs.init_process_group("nccl") as comm:
        comm.barrier()


@pytest.mark.ranks(2, on=("fake",), environment=HANGS, ends={1: -signal.SIGKILL})
def test_a_rank_that_dies_in_ncclcomminitrank_is_named(rank):
    if rank == 1:
        communicator_class().__init__ = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(gs.RankFailed) as raised:
        gs.init_process_group("nccl", timeout_seconds=60)
    assert raised.value.rank == 1


@stuck
def test_ncclcomminitrank_has_a_deadline(comm, tmp_path):
    """Of a second process group: the imports and the first contact of a busy machine take none of its seconds."""
    from cupy.cuda import nccl

    def come_late(*_):
        hear(tmp_path, "rank 0 has failed")
        raise nccl.NcclError(6)

    rank = comm.rank
    comm.barrier()
    gs.destroy_process_group()
    if rank == 1:
        communicator_class().__init__ = come_late
    meet(tmp_path, comm, "both begin again")
    with pytest.raises(gs.GradsyncError) as raised:
        gs.init_process_group("nccl", timeout_seconds=(2.0, 60.0)[rank])
    if rank == 0:
        assert isinstance(raised.value, gs.RendezvousTimeout)
        assert "ncclCommInitRank" in str(raised.value)
        tell(tmp_path, "rank 0 has failed")


@pytest.mark.ranks(2, on=("fake",), environment=HANGS)
def test_a_rank_that_can_start_no_thread_says_so_and_the_ranks_may_try_again(rank):
    """At each thread that gradsync starts, one after the other."""
    start = threading.Thread.start
    made = []  # keeps CuPy's communicators, as a program that keeps the error does
    init = communicator_class().__init__

    def initialize(raw, *arguments):
        made.append(raw)
        init(raw, *arguments)

    communicator_class().__init__ = initialize
    refused_at, begun = 0, False
    while not begun:
        left = refused_at

        def start_or_refuse(thread):
            nonlocal left
            if thread.name.startswith("gradsync"):
                left -= 1
                if left == -1:
                    raise RuntimeError("can't start new thread")
            start(thread)

        if rank == 1:
            threading.Thread.start = start_or_refuse
        try:
            with gs.init_process_group("nccl", timeout_seconds=60) as comm:
                threading.Thread.start = start
                comm.barrier()
                begun = left >= 0
                begun = comm.objects.broadcast(begun, root=1)
        except (RuntimeError, gs.GradsyncError) as error:
            threading.Thread.start = start
            assert "cannot be started; raise the limit" in str(error)
        refused_at += 1
    assert refused_at > 3


@pytest.mark.ranks(on={"fake": (2,), "gpu": (1, 2)}, fresh=True)
def test_generation_after_generation(comm):
    options = {"allow_shared_gpu": True}
    for generation in range(3):
        array = full(comm.rank + generation)
        comm.all_reduce(array)
        assert_all(array, total(comm, generation))
        gs.destroy_process_group()
        with pytest.raises(gs.CommunicatorClosed):
            comm.barrier()
        comm = gs.init_process_group("nccl", **options)
    gs.destroy_process_group()


# -- Ends -------------------------------------------------------------------------------------------------------------


def note_ends():
    """The communicators of CuPy's that are ended from now on: by which method."""
    ends, raw = [], communicator_class()
    for name in ("abort", "destroy"):

        def end(self, name=name, method=getattr(raw, name)):  # noqa: B008
            if self.comm:
                ends.append(name)
            method(self)

        setattr(raw, name, end)
    return ends


@pytest.mark.ranks(2, on=("fake",), fresh=True, environment=HANGS)
def test_a_communicator_that_nobody_has_any_more_ends_and_the_world_goes_on(comm):
    ends, before = note_ends(), threading.active_count()
    for number in range(3):
        group = comm.new_group(range(comm.world_size))
        group.barrier()
        comm.barrier()
        del group
        wait_until(lambda number=number: gc.collect() >= 0 and len(ends) > number)
    comm.barrier()
    assert_all(comm.all_reduce(full(1)), comm.world_size)
    wait_until(lambda: threading.active_count() <= before + 2)


@pytest.mark.ranks(2, on=("fake",), fresh=True)
def test_it_is_destroyed_since_other_ranks_may_still_read_its_memory(comm):
    ends = note_ends()
    group = comm.new_group([0, 1])
    group.barrier()
    comm.barrier()
    del group
    wait_until(lambda: gc.collect() >= 0 and ends)
    comm.barrier()
    assert ends == ["destroy"]


@pytest.mark.ranks(2, on=("fake",), fresh=True)
def test_no_rank_but_0_makes_a_context_on_gpu_0(comm):
    """Half a GB of its memory each, and an error where the GPU is exclusive to one process."""
    from cupy.cuda._devices import contexts

    comm.all_reduce(full(1))
    callback = gs.AllreduceCallback("sum", comm)
    callback.flush()
    assert contexts == {comm.rank}


@pytest.mark.ranks(2, on=("fake",))
@pytest.mark.parametrize("stride", [23, pytest.param(5, marks=pytest.mark.slow)])
def test_the_garbage_collector_may_end_a_communicator_anywhere(comm, stride):
    """Also where a thread has just taken a lock to send a message."""
    gc.disable()
    number, call, has_struck = 0, 0, True

    def strike(_frame, event, _argument):
        nonlocal call, forgotten
        call += event == "call"
        if call == number and forgotten:
            forgotten = []
            gc.collect()

    while has_struck:
        forgotten = [comm.split(color=0)]
        comm.barrier()
        gc.freeze()  # what is looked at then is little
        number, call = number + stride, 0
        sys.setprofile(strike)
        comm.objects.all_gather(number)
        sys.setprofile(None)
        has_struck = any(comm.objects.all_gather(not forgotten))
    gc.unfreeze()
    gc.enable()
    assert number > 50


@pytest.mark.ranks(on={"fake": (2,), "gpu": (2,)}, fresh=True)
def test_a_forked_child_cannot_use_it_and_does_not_harm_it(comm):
    array = full(1, 3)
    comm.all_reduce(array)
    pid = os.fork()
    if pid == 0:
        try:
            with pytest.raises(gs.CommunicatorClosed):
                comm.all_reduce(np.ones(3))
            comm.close()
            comm.abort("in the child")
            gs.destroy_process_group()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    comm.all_reduce(array)
    assert_all(array, comm.world_size**2)


@pytest.mark.ranks(3, on=("fake",), fresh=True, environment=HANGS)
def test_a_slow_done_callback_keeps_no_failure_from_being_noticed(comm, tmp_path):
    """A failure ends work of several communicators: callbacks of the first keep nobody from the second."""
    groups = [comm.new_group(range(comm.world_size)) for _ in range(2)]
    is_in_it, goes_on, called, producer = threading.Event(), threading.Event(), [], side_stream()

    def dawdle(_):
        called.append(threading.get_ident())
        is_in_it.set()
        goes_on.wait()

    callbacks = [gs.AllreduceCallback("sum", group) for group in groups]
    for group, callback in zip(groups, callbacks, strict=True):
        step(callback)
        group.barrier()
    with Obstacle(producer):
        with producer:
            for group, callback in zip(groups, callbacks, strict=True):
                group.asynchronous.all_reduce(full(0)).add_done_callback(dawdle)
                step(callback)[0].add_done_callback(dawdle)
        meet(tmp_path, comm, "all have launched")
        if comm.rank == 0:
            comm.abort("enough")
        wait_until(lambda: comm.closed and all(group.closed for group in groups))
        is_in_it.wait()
    goes_on.set()
    wait_until(lambda: len(called) == 4)
    assert threading.get_ident() not in called
    assert len(set(called)) == 1
    for group in (*groups, comm):  # which tells who has not been told
        with contextlib.suppress(gs.RankFailed):
            group.close()


# -- Threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, on=("fake", "gpu"), environment={"FAKE_CUPY_DELAY_MS": "1", **HANGS})
def test_two_threads_with_a_communicator_each_launch_in_one_order(comm):
    """Each in its turn, which is the same on all ranks; the collectives of both are under way together."""
    import cupy

    groups = [comm.new_group(range(comm.world_size)) for _ in range(2)]
    for group in groups:
        group.barrier()
    turns, results, device = [threading.Semaphore(1), threading.Semaphore(0)], ([], []), cupy.cuda.Device()

    def reduce(which):
        with device:
            for number in range(20):
                turns[which].acquire()
                array = full(comm.rank + number)
                results[which].append((number, groups[which].asynchronous.all_reduce(array)))
                turns[1 - which].release()

    threads = [threading.Thread(target=reduce, args=[which]) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, future in (*results[0], *results[1]):
        assert_all(future.result(), total(comm, number))
    for group in groups:
        group.close()


@pytest.mark.ranks(2, on=("fake",), fresh=True)
@pytest.mark.parametrize("for_ever", [False, True])
def test_one_thread_at_a_time_launches_on_a_gpu(comm, for_ever):
    """Not even in communicators of their own: NCCL's rule. The others wait, and not for ever."""
    groups = [comm.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        group.all_reduce(full(1))
    is_in_it, goes_on, calls, reduce = threading.Event(), threading.Event(), [], communicator_class().allReduce

    def dawdle(raw, *arguments):
        calls.append(raw)
        is_in_it.set()
        goes_on.wait()
        reduce(raw, *arguments)

    communicator_class().allReduce = dawdle
    arrays = [full(comm.rank) for _ in groups]
    threads = [
        threading.Thread(target=told, args=pair) for pair in zip([g.all_reduce for g in groups], arrays, strict=True)
    ]
    threads[0].start()
    is_in_it.wait()
    if for_ever:
        groups[1]._backend.timeout_seconds = 0.1
        with pytest.raises((gs.CollectiveTimeout, gs.RankFailed), match="launch all from one thread, or in the same"):
            groups[1].all_reduce(arrays[1])
    else:
        threads[1].start()
        time.sleep(0.1)
    assert len(calls) == 1
    goes_on.set()
    for thread in threads[: 1 if for_ever else 2]:
        thread.join()
    if not for_ever:
        for array in arrays:
            assert_all(array, total(comm, 0))


@stuck
def test_failures_are_noticed_while_the_driver_answers_no_question(comm, tmp_path):
    """cudaEventQuery may wait for a lock of the driver's, which a hung kernel keeps: look for failures first."""
    from cupy.cuda._driver import _Driver

    future = reduce_without_rank_1(comm, tmp_path)
    if comm.rank == 1:
        hear(tmp_path, "the driver no longer answers")
        comm.abort("enough")
        return
    lifted, failed, is_asked, query = threading.Event(), threading.Event(), threading.Event(), _Driver.cuEventQuery
    future.add_done_callback(lambda _: failed.set())

    def ask(event):
        is_asked.set()
        lifted.wait()
        return query(event)

    _Driver.cuEventQuery = staticmethod(ask)
    is_asked.wait()
    tell(tmp_path, "the driver no longer answers")
    noticed = failed.wait(20)
    lifted.set()
    assert noticed


@stuck_with_deadline
def test_so_is_the_deadline_though_nobody_knows_whether_the_work_has_begun(comm, tmp_path):
    from cupy.cuda._driver import _Driver

    comm.all_reduce(full(1))  # the first contact
    meet(tmp_path, comm, "all have met")
    if comm.rank == 1:
        assert isinstance(failure_of(comm), gs.CollectiveTimeout)
        return
    lifted, failed, query = threading.Event(), threading.Event(), _Driver.cuEventQuery

    def ask(event):
        if threading.current_thread().name == "gradsync-nccl-gpu":
            lifted.wait()
        return query(event)

    _Driver.cuEventQuery = staticmethod(ask)
    future = comm.asynchronous.all_reduce(full(1))
    future.add_done_callback(lambda _: failed.set())
    noticed = failed.wait(20)
    lifted.set()
    assert noticed
    assert isinstance(future.exception(), gs.CollectiveTimeout)


@pytest.mark.ranks(2, on=("fake",), environment=HANGS, fresh=True, options={"collective_timeout_seconds": 1.0})
def test_memory_that_is_freed_only_when_a_kernel_ends_does_not_keep_the_deadline_from_ending_it(comm):
    """Without a pool, freeing memory waits for all kernels."""
    import cupy

    class Memory:
        def __del__(self):
            has_waited_in_vain.append(not freed.wait(15.0))

    comm.barrier()
    freed, has_waited_in_vain = threading.Event(), []
    if comm.rank == 0:
        with Obstacle(cupy.cuda.get_current_stream()):
            with comm._backend.launching(None) as launch:
                launch.keep(Memory())
            comm.asynchronous.all_reduce(full(1))
    try:
        wait_until(lambda: comm.closed, "the deadline")
    finally:
        freed.set()
    assert not any(has_waited_in_vain)


@pytest.mark.ranks(1, on=("fake",), fresh=True)
def test_a_communicator_that_has_ended_closes_also_after_no_thread_could_be_started_for_another(comm):
    from gradsync.communicators.nccl import work

    comm.abort("it is over")
    wait_until(lambda: not work._all, "the end of its threads")
    start = threading.Thread.start

    def start_or_refuse(thread):
        if thread.name == "gradsync-nccl-callbacks":
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="cannot be started"):
        patch.setattr(threading.Thread, "start", start_or_refuse)
        work._watch(comm._backend._watched)
    comm.close()
