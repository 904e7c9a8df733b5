"""The queue of asynchronous collectives: order, threads, ends; without other ranks. With them: test_asynchronous.py."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from gradsync.communicators import collective_queue
from gradsync.communicators.local import local_communicator
from gradsync.futures import pending

WAIT = 20.0


@pytest.fixture
def comm() -> Iterator[gs.Communicator]:
    with local_communicator() as communicator:
        yield communicator
    assert not pending


def submit(comm: Any, run: Callable[[], Any]) -> gs.CollectiveFuture:
    return collective_queue.submit(comm.lifetime, "a test", "rank 0/1: a test", run)


class Gate:
    """A job that runs until it is let through."""

    def __init__(self, comm: Any) -> None:
        self._entered, self._open = threading.Event(), threading.Event()
        self.future = submit(comm, self._run)

    def _run(self) -> str:
        self._entered.set()
        assert self._open.wait(WAIT)
        return "through"

    def await_entered(self) -> None:
        assert self._entered.wait(WAIT)

    def open(self) -> None:
        self._open.set()


def serving_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gradsync-collectives"]


def test_jobs_run_in_order_in_one_thread_beside_the_caller(comm: Any) -> None:
    ran: list[tuple[int, int]] = []
    futures = [submit(comm, lambda i=i: ran.append((i, threading.get_ident())) or i) for i in range(200)]
    assert [future.result(WAIT) for future in futures] == list(range(200))
    assert [number for number, _ in ran] == list(range(200))
    assert len({thread for _, thread in ran} | {threading.get_ident()}) == 2


def test_the_caller_goes_on(comm: Any) -> None:
    gate = Gate(comm)
    gate.await_entered()
    assert not gate.future.done()
    gate.open()
    assert gate.future.result(WAIT) == "through"


def test_a_collective_without_a_future_waits_until_all_is_over(comm: Any) -> None:
    gate, seen = Gate(comm), []
    later = submit(comm, lambda: seen.append("queued"))
    later.add_done_callback(lambda _: seen.append("callback"))
    gate.await_entered()
    threading.Timer(0.1, gate.open).start()
    with local_communicator() as other:  # of whichever communicator
        other.barrier()
        seen.append("barrier")
    assert seen == ["queued", "callback", "barrier"]


def test_a_failed_job_fails_its_future_only(comm: Any) -> None:
    failed = submit(comm, lambda: 1 / 0)
    left = submit(comm, sys.exit)
    fine = submit(comm, lambda: 3)
    assert fine.result(WAIT) == 3
    assert isinstance(failed.exception(), ZeroDivisionError)
    assert isinstance(left.exception(), SystemExit)


def test_a_callback_that_leaves_does_not_end_the_others(comm: Any, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(comm)
    called: list[Any] = []
    gate.future.add_done_callback(lambda _: sys.exit(3))
    gate.future.add_done_callback(called.append)
    fine = submit(comm, lambda: 3)
    gate.open()
    assert fine.result(WAIT) == 3
    assert "a done-callback of rank 0/1: a test raised SystemExit" in caplog.text
    assert called == [gate.future]


def test_a_callback_that_asks_for_a_later_result_is_told_at_once(comm: Any) -> None:
    gate, errors = Gate(comm), []
    later = submit(comm, lambda: 1)

    def ask(_: Any) -> None:
        try:
            later.result()
        except gs.FutureNotReady as error:
            errors.append(str(error))

    gate.future.add_done_callback(ask)
    gate.open()
    assert later.result(WAIT) == 1
    assert "return from that first" in errors[0]


def test_the_thread_ends_when_idle_and_comes_back(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_queue, "_IDLE_SECONDS", 0.01)
    done: list[Any] = []

    def use() -> None:  # in a thread of its own, which has a queue of its own
        for number in range(2):
            done.append(submit(comm, lambda number=number: number).result(WAIT))
            for thread in serving_threads():
                thread.join(WAIT)
            done.append(serving_threads())

    for thread in serving_threads():
        thread.join(WAIT)
    user = threading.Thread(target=use)
    user.start()
    user.join(2 * WAIT)
    assert done == [0, [], 1, []]


def test_arrays_and_communicators_are_let_go(comm: Any) -> None:
    array = np.zeros(3)
    other = local_communicator()
    gone = [weakref.ref(array), weakref.ref(other)]
    submit(other, lambda array=array: array.sum()).result(WAIT)
    other.close()
    del array, other
    comm.barrier()  # the job itself is over a moment after its result is there
    deadline = time.monotonic() + WAIT
    while any(ref() is not None for ref in gone) and time.monotonic() < deadline:
        gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_nothing_is_looked_at_where_nothing_was_submitted(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hot path of every collective: one look at an empty dictionary."""
    monkeypatch.setattr("gradsync.communicators.lifetime.await_earlier", lambda _: pytest.fail("looked"))
    monkeypatch.setattr("gradsync.communicators.lifetime.await_submitted", lambda _: pytest.fail("looked"))
    comm.barrier()
    with local_communicator() as other:
        other.barrier()


# -- Threads ---------------------------------------------------------------------------------------------------------


def test_threads_do_not_wait_for_each_other(comm: Any) -> None:
    """Each has its own order: on another rank, the other one may come first."""
    gate, done = Gate(comm), []

    def use_another() -> None:
        with local_communicator() as other:
            done.append(submit(other, lambda: "asynchronous").result(WAIT))
            other.barrier()
            done.append("synchronous")

    thread = threading.Thread(target=use_another)
    thread.start()
    thread.join(WAIT)
    assert done == ["asynchronous", "synchronous"]
    gate.open()


def test_the_jobs_of_one_communicator_keep_their_order_whoever_submits(comm: Any) -> None:
    gate, order = Gate(comm), []
    thread = threading.Thread(target=lambda: submit(comm, lambda: order.append("another thread's")))
    thread.start()
    thread.join(WAIT)
    threading.Timer(0.05, gate.open).start()
    comm.barrier()
    order.append("barrier")
    assert order == ["another thread's", "barrier"]


def test_a_callback_that_asks_for_what_another_thread_has_submitted_is_told_at_once(comm: Any) -> None:
    """That comes after it, on the same communicator: waiting would never end, and neither would close()."""
    gate, errors = Gate(comm), []
    others: list[gs.CollectiveFuture] = []

    def ask(_: Any) -> None:
        thread = threading.Thread(target=lambda: others.append(submit(comm, lambda: 1)))
        thread.start()
        thread.join(WAIT)
        for wait in (others[0].result, others[0].wait):
            try:
                wait()
            except gs.FutureNotReady as error:
                errors.append(str(error))

    gate.future.add_done_callback(ask)
    gate.open()
    assert gate.future.result(WAIT) == "through"
    comm.barrier()
    assert len(errors) == 2
    assert others[0].result(WAIT) == 1


def test_two_threads_submit_for_one_communicator_one_after_the_other(comm: Any) -> None:
    """Else both could find the same job before theirs, and both would run at once."""
    inside, most = [0], [0]

    def alone() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0)  # whoever could be inside too, has a chance
        inside[0] -= 1

    def use() -> None:
        futures = [submit(comm, alone) for _ in range(300)]
        for future in futures:
            future.result(WAIT)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT)
    finally:
        sys.setswitchinterval(before)
    assert most == [1]


def test_who_submits_waits_while_another_thread_does(comm: Any) -> None:
    ended = threading.Event()
    with comm.lifetime.submitting:
        thread = threading.Thread(target=lambda: (submit(comm, lambda: None), ended.set()))
        thread.start()
        assert not ended.wait(0.05)
    assert ended.wait(WAIT)
    thread.join(WAIT)


# -- Callbacks that call collectives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("adds", ["in order", "late", "when it is done", "in another thread"])
def test_a_callback_must_not_submit_whenever_it_was_added(comm: Any, adds: str) -> None:
    gate, answers = Gate(comm), []

    def call(_: Any) -> None:
        for attempt in (comm.barrier, lambda: submit(comm, lambda: None), lambda: comm.asynchronous.barrier()):
            try:
                attempt()
            except gs.InvalidArgument as error:
                answers.append(str(error))

    later = submit(comm, lambda: None) if adds == "late" else gate.future
    if adds == "when it is done":
        gate.open()
        later.result(WAIT)
    thread = threading.Thread(target=gate.future.add_done_callback, args=[call])
    if adds == "in another thread":
        thread.start()
        thread.join(WAIT)
    else:
        thread.run()
    gate.open()
    with pytest.raises(gs.InvalidArgument, match="barrier in a done-callback"):  # the first
        comm.barrier()
    assert len(answers) == 3
    comm.barrier()
    assert later.result(WAIT) == ("through" if later is gate.future else None)


# -- What is left behind ---------------------------------------------------------------------------------------------


def test_the_last_result_is_not_kept(comm: Any) -> None:
    future = submit(comm, lambda: np.zeros(3))
    gone = weakref.ref(future.result(WAIT))
    del future
    comm.barrier()  # after which the job is over
    assert comm.lifetime.last_job is None
    deadline = time.monotonic() + WAIT
    while gone() is not None and time.monotonic() < deadline:  # the thread lets its job go a moment later
        time.sleep(0.001)
    assert gone() is None


class Held:
    """Something that can be seen to go."""


def test_a_failed_future_holds_no_arrays(comm: Any) -> None:
    seen: list[weakref.ref[Held]] = []

    def run() -> None:
        held = Held()
        seen.append(weakref.ref(held))
        raise gs.RankFailed("rank 1 died")

    future = submit(comm, run)
    assert isinstance(future.exception() if future.done() else wait_for_error(future), gs.RankFailed)
    assert seen[0]() is None


def wait_for_error(future: gs.CollectiveFuture) -> BaseException | None:
    with pytest.raises(gs.GradsyncError):
        future.result(WAIT)
    return future.exception()


def fail() -> None:
    raise gs.RankFailed("rank 1 died")


LOST = "a test has failed, and nobody has asked its future: RankFailed: rank 1 died"


def test_a_failure_that_nobody_asks_for_is_logged_when_its_future_goes(comm: Any, caplog: Any) -> None:
    submit(comm, fail)
    comm.barrier()
    deadline = time.monotonic() + WAIT
    while LOST not in caplog.text and time.monotonic() < deadline:
        gc.collect()
    assert caplog.text.count(LOST) == 1


def test_a_failure_that_nobody_asks_for_is_logged_at_the_close(caplog: Any) -> None:
    comm = local_communicator()
    future = submit(comm, fail)
    comm.close()
    assert caplog.text.count(LOST) == 1
    del future
    assert caplog.text.count(LOST) == 1


def asked_by_callback(comm: Any) -> None:
    gate = Gate(comm)
    submit(comm, fail).add_done_callback(gs.CollectiveFuture.exception)
    gate.open()


def asked_afterwards(comm: Any) -> None:
    wait_for_error(submit(comm, fail))


@pytest.mark.parametrize("ask", [asked_by_callback, asked_afterwards])
def test_a_failure_that_was_asked_for_is_not_logged(ask: Callable[[Any], None], caplog: Any) -> None:
    comm = local_communicator()
    ask(comm)
    comm.close()
    gc.collect()
    assert "nobody has asked" not in caplog.text


def test_what_only_comes_after_an_end_is_not_logged(caplog: Any) -> None:
    comm, other = local_communicator(), local_communicator()
    gate = Gate(other)
    futures = [submit(comm, lambda: None) for _ in range(2)]
    comm.abort("the disk is full")
    gate.open()
    other.close()
    del futures
    gc.collect()
    assert "nobody has asked" not in caplog.text


# -- Ends ------------------------------------------------------------------------------------------------------------


def test_close_waits_for_what_was_submitted() -> None:
    comm, ran = local_communicator(), []
    gate = Gate(comm)
    futures = [submit(comm, lambda i=i: ran.append(i)) for i in range(3)]
    threading.Timer(0.05, gate.open).start()
    comm.close()
    assert ran == [0, 1, 2]
    assert [future.exception() for future in futures] == [None] * 3


def test_abort_fails_what_has_not_begun_at_once_and_in_order() -> None:
    comm, other, order = local_communicator(), local_communicator(), []
    gate = Gate(other)
    gate.await_entered()
    futures = [submit(comm, lambda: pytest.fail("it ran")) for _ in range(3)]
    for number, future in enumerate(futures):
        future.add_done_callback(lambda _, number=number: order.append(number))
    comm.abort("the disk is full")
    assert order == [0, 1, 2]
    for future in futures:
        with pytest.raises(gs.CommunicatorClosed, match="a test on a local communicator .* the disk is full"):
            future.result()
    gate.open()
    other.close()
    assert gate.future.result() == "through"


def test_a_callback_may_close_its_communicator() -> None:
    comm = local_communicator()
    gate = Gate(comm)
    gate.future.add_done_callback(lambda _: comm.close())
    later = submit(comm, lambda: comm._run(comm._barrier_call(), None))
    gate.open()
    with pytest.raises(gs.CommunicatorClosed, match="it was closed"):
        later.wait(timeout=WAIT)


def test_a_job_of_a_closed_communicator_fails_by_itself() -> None:
    comm = local_communicator()
    comm.close()
    future = submit(comm, lambda: comm._run(comm._barrier_call(), None))
    with pytest.raises(gs.CommunicatorClosed, match="barrier on a local communicator"):
        future.result(WAIT)


@pytest.mark.parametrize("wait", ["result", "barrier", "close"])
def test_ctrl_c_comes_through_while_the_main_thread_waits(wait: str) -> None:
    comm = local_communicator()
    gate = Gate(comm)
    gate.await_entered()
    last = submit(comm, lambda: None)
    waits = {"result": last.result, "barrier": comm.barrier, "close": comm.close}
    timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        waits[wait]()
    timer.join()
    gate.open()
    comm.close()
    assert last.exception() is None


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_the_child_of_a_fork_has_a_queue_of_its_own(comm: Any) -> None:
    gate = Gate(comm)
    gate.await_entered()
    queued = submit(comm, lambda: None)
    called = []
    queued.add_done_callback(called.append)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, report_of_child(gate.future, queued, called).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    gate.open()
    queued.result(WAIT)
    assert text == "CommunicatorClosed CommunicatorClosed 0 4"


def report_of_child(running: gs.CollectiveFuture, queued: gs.CollectiveFuture, called: list[Any]) -> str:
    try:
        errors = [type(future.exception()).__name__ for future in (running, queued)]
        with local_communicator() as comm:
            answer = submit(comm, lambda: 4).result(WAIT)
            comm.barrier()
        return f"{' '.join(errors)} {len(called)} {answer}"
    except BaseException as error:
        return repr(error)
