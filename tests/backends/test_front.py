"""The front of all backends alone: failures that a thread finds, and the order of things at an end.

Its backend is one of a single rank that does what a test wants.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

import gradsync as gs
from bucketing.reference import Heard
from commands import wait_until
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.local import LocalBackend

DIED = gs.RankFailed("rank 0/2: rank 1 died", rank=1)


class Odd(LocalBackend):
    """A barrier of it calls `within`; messages of it end when `moves` says so."""

    def __init__(self):
        super().__init__()
        self.within = lambda: None
        self.moves = lambda messages: None
        self.ends = []

    def barrier(self, agreement):
        self.within()

    def exchange(self, sends, receives, awaited=(), seconds=None):
        self.moves([*sends, *receives])

    def announce(self, aborted_because=None, culprit=None):
        self.ends.append("closed" if aborted_because is None else aborted_because)

    def release(self):
        self.ends.append("released")


def raise_died():
    raise DIED


@pytest.fixture
def made():
    backend = Odd()
    comm = Communicator(backend)
    yield comm, backend
    comm.close()


def pending(comm):
    return comm.asynchronous.exchange(np.ones(3), dest=0, out=np.zeros(3), source=0)


def test_a_failure_that_a_thread_finds_is_raised_by_the_next_call_and_once(made):
    comm, backend = made
    future, called = pending(comm), []
    future.add_done_callback(called.append)
    thread = threading.Thread(target=backend.fail, args=(DIED,))
    thread.start()
    thread.join()
    assert called == [future]
    for _ in range(2):
        with pytest.raises(gs.RankFailed, match="rank 1 died"):
            future.result()
    with pytest.raises(gs.RankFailed, match="rank 1 died"):  # a future that was told is no call
        comm.barrier()
    for _ in range(2):
        with pytest.raises(gs.CommunicatorClosed, match="rank 1 died"):
            comm.barrier()
    assert comm.closed
    backend.fail(gs.RankFailed("another", rank=0))
    with pytest.raises(gs.CommunicatorClosed, match="rank 1 died"):
        comm.all_reduce(np.ones(2))


def test_a_failure_that_a_thread_finds_too_is_raised_once(made):
    """The collective that raises it by itself is the call that tells it."""
    comm, backend = made

    def both():
        backend.fail(DIED)
        raise_died()

    backend.within = both
    with pytest.raises(gs.RankFailed):
        comm.barrier()
    with pytest.raises(gs.CommunicatorClosed, match="rank 1 died"):
        comm.barrier()


@pytest.mark.parametrize("how", ["close", "abort", "fail"])
def test_the_backend_is_released_once_and_not_below_a_collective(made, how):
    """The others are told at once; the memory is kept until the collective has left it."""
    comm, backend = made
    future = pending(comm)
    is_in, may_go, errors = threading.Event(), threading.Event(), []

    def stay():
        is_in.set()
        assert may_go.wait(60)

    def run():
        try:
            comm.barrier()
        except gs.GradsyncError as error:
            errors.append(error)

    backend.within = stay
    thread = threading.Thread(target=run)
    thread.start()
    assert is_in.wait(60)
    {"close": comm.close, "abort": lambda: comm.abort("enough"), "fail": lambda: backend.fail(DIED)}[how]()
    assert backend.ends == {"close": ["closed"], "abort": ["enough"], "fail": []}[how]
    assert comm.closed
    may_go.set()
    thread.join()
    assert errors == []
    assert backend.ends[-1] == "released"
    assert backend.ends.count("released") == 1
    assert future.done()
    with pytest.raises(gs.GradsyncError):
        future.result()
    comm.close()
    comm.abort("again")
    assert backend.ends.count("released") == 1


def test_a_collective_that_fails_beside_close_tells_the_others_that_it_failed(made):
    """A rank that waits for a third one takes no notice of one that has only closed."""
    comm, backend = made
    is_in, may_go = threading.Event(), threading.Event()

    def stay():
        is_in.set()
        assert may_go.wait(60)
        raise_died()

    def run():
        with pytest.raises(gs.RankFailed):
            comm.barrier()

    backend.within = stay
    thread = threading.Thread(target=run)
    thread.start()
    assert is_in.wait(60)
    comm.close()
    may_go.set()
    thread.join()
    assert [end.partition(":")[0] for end in backend.ends] == ["closed", "in barrier", "released"]


def test_messages_beside_a_collective_of_another_thread_are_refused(made):
    """Else one could be lost between two threads. One that only looks at a future is not refused."""
    comm, backend = made
    future = pending(comm)
    is_in, may_go = threading.Event(), threading.Event()

    def stay():
        is_in.set()
        assert may_go.wait(60)

    backend.within = stay
    thread = threading.Thread(target=comm.barrier)
    thread.start()
    assert is_in.wait(60)
    with pytest.raises(gs.InvalidArgument, match="another thread"):
        pending(comm)
    with pytest.raises(gs.InvalidArgument, match="another thread"):
        future.result()
    assert not future.done()
    may_go.set()
    thread.join()
    assert not comm.closed


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_done_callback_that_ends_the_program_loses_no_other(made, kind):
    """Those that are left are called at the next look at their end."""
    comm, _ = made
    futures, called = [pending(comm) for _ in range(3)], []

    def leave(future):
        called.append(future)
        raise kind

    futures[0].add_done_callback(leave)
    for future in futures[1:]:
        future.add_done_callback(called.append)
    with pytest.raises(kind):
        comm.close()
    comm.close()
    assert called == futures
    for future in futures:
        assert future.done()
        with pytest.raises(gs.CommunicatorClosed):
            future.result()


def test_the_end_of_a_wait_that_is_too_short_is_not_read_as_its_error(made):
    """The error comes later, and is logged if nobody reads it then."""
    comm, backend = made
    messages = []
    backend.moves = messages.extend
    future = pending(comm)
    with pytest.raises(gs.CollectiveTimeout):
        future.result(0.0)
    assert len(messages) == 2
    with Heard() as lines:
        for message in messages:
            message.end(gs.PlanMismatch("the ranks disagree", descriptions={}, places={}))
        del future
    assert sum("the ranks disagree" in line for line in lines) == 1


def test_a_handler_of_the_log_may_run_a_collective(made):
    comm, backend = made

    class Counting(Heard):
        def emit(self, record):
            comm.all_reduce(np.ones(3))
            super().emit(record)

    backend.within = lambda: (_ for _ in ()).throw(gs.PlanMismatch("they disagree", descriptions={}, places={}))
    with Counting() as lines:
        future = comm.asynchronous.barrier()
        del future
    assert ["they disagree" in line for line in lines] == [True]


def test_who_waits_at_close_hears_of_a_second_close_at_once(made):
    """A handler of a signal may close the communicator within close()."""
    comm, backend = made
    pending(comm)
    backend.moves = lambda messages: comm.close()
    comm.close()
    wait_until(lambda: comm.closed)
    assert backend.ends == ["closed", "released"]


def test_a_done_callback_may_close_its_communicator(made):
    """It cannot wait for messages there; nothing is logged, as nothing has failed."""
    comm, backend = made
    futures = [pending(comm) for _ in range(2)]
    futures[0].add_done_callback(lambda _: comm.close())

    def move(messages):
        for message in messages[::2]:  # both ends of the first
            message.end()

    backend.moves = move
    with Heard() as lines:
        futures[0].result()
    assert lines == []
    assert backend.ends == ["closed", "released"]
    with pytest.raises(gs.CommunicatorClosed):
        futures[1].result()
