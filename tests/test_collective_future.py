"""CollectiveFuture: what waits, what does not, and who may ask. Values and callbacks: see bucketing/test_future.py."""

from __future__ import annotations

import threading

import pytest

import gradsync as gs
from gradsync.collective_future import CollectiveFuture

NAME = "rank 0/2: all_gather"


def made_elsewhere() -> CollectiveFuture:
    """A future that this thread may wait for."""
    return CollectiveFuture(NAME, completing_thread=-1)


def test_it_is_what_a_gradients_future_is() -> None:
    assert issubclass(gs.GradientFuture, gs.CollectiveFuture)
    assert gs.CollectiveFuture is CollectiveFuture


def test_the_thread_that_completes_it_is_told_at_once() -> None:
    future = CollectiveFuture(NAME)
    for ask in (future.result, future.wait):
        with pytest.raises(gs.FutureNotReady, match=f"{NAME} is not ready: it comes after the done-callback"):
            ask()


def test_it_has_no_exception_before_it_has_ended() -> None:
    with pytest.raises(gs.FutureNotReady, match=r"exception\(\) of rank 0/2: all_gather .* has not ended yet"):
        made_elsewhere().exception()


def test_a_wait_has_its_own_deadline_and_leaves_the_collective_going() -> None:
    future = made_elsewhere()
    with pytest.raises(gs.CollectiveTimeout, match=r"all_gather did not end within 0.01 s"):
        future.result(timeout=0.01)
    future.resolve(3)
    assert future.result(timeout=0) == 3


def test_without_a_timeout_the_wait_is_the_collectives_own() -> None:
    future = made_elsewhere()
    waiting = threading.Event()

    def ask() -> None:
        waiting.set()
        got.append(future.result())

    got: list[int] = []
    thread = threading.Thread(target=ask)
    thread.start()
    assert waiting.wait(10)
    future.resolve(5)
    thread.join(10)
    assert got == [5]


def test_a_timeout_of_its_own() -> None:
    future = CollectiveFuture(NAME, timeout_seconds=0.01, completing_thread=-1)
    with pytest.raises(gs.CollectiveTimeout, match=r"0\.01 s"):
        future.wait()


def test_many_threads_wait_for_one_value() -> None:
    future = made_elsewhere()
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(future.result(30))) for _ in range(8)]
    for thread in threads:
        thread.start()
    future.resolve(7)
    for thread in threads:
        thread.join(30)
    assert got == [7] * 8


def test_disowned_it_fails_and_calls_nobody() -> None:
    future, seen = made_elsewhere(), []
    future.add_done_callback(seen.append)
    error = gs.CommunicatorClosed("forked")
    future.disown(error)
    assert future.done()
    assert future.exception() is error
    future.resolve(1)
    with pytest.raises(gs.CommunicatorClosed, match="forked"):
        future.result()
    assert seen == []


def test_disowned_after_its_end_it_keeps_its_value() -> None:
    future = made_elsewhere()
    future.resolve(1)
    future.disown(gs.CommunicatorClosed("forked"))
    assert future.result() == 1


def test_it_cannot_be_cancelled() -> None:
    assert not hasattr(CollectiveFuture, "cancel")


def test_it_says_what_it_is() -> None:
    future = made_elsewhere()
    assert repr(future) == f"<CollectiveFuture of {NAME}: pending>"
    future.fail(gs.RankFailed("rank 1 died"))
    assert repr(future) == f"<CollectiveFuture of {NAME}: failed>"
    assert future.name == NAME
