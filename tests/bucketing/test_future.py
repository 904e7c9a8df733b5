"""GradientFuture: not ready before it is, ready for ever after."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import gradsync as gs
from gradsync.bucketing.future import GradientFuture


def pending() -> GradientFuture:
    return GradientFuture("the gradient of 'w'", timeout_seconds=30)


@pytest.mark.parametrize("ask", ["shape", "dtype", "device"])
def test_attributes_are_not_ready_before_the_value_is(ask: str) -> None:
    with pytest.raises(gs.FutureNotReady, match="not ready"):
        getattr(pending(), ask)


@pytest.mark.parametrize("ask", ["numpy", "exception", "result", "wait"])
def test_methods_are_not_ready_before_the_value_is(ask: str) -> None:
    with pytest.raises(gs.FutureNotReady, match="'w'.*not ready"):
        getattr(pending(), ask)()


def test_resolved() -> None:
    future, value = pending(), np.ones((2, 3), np.float32)
    assert not future.done()
    future.resolve(value)
    assert future.done()
    assert future.result() is value
    assert future.exception() is None
    assert future.numpy() is value
    assert (future.shape, future.dtype, str(future.device)) == ((2, 3), np.float32, "cpu")
    future.wait()
    assert "ready" in repr(future)


def test_failed() -> None:
    future, error = pending(), gs.RankFailed("rank 1 died", rank=1)
    future.fail(error)
    assert future.done()
    assert future.exception() is error
    future.wait()
    for ask in (future.result, future.numpy, lambda: future.shape):
        with pytest.raises(gs.RankFailed):
            ask()


def test_first_outcome_stays() -> None:
    future = pending()
    future.resolve(1)
    future.fail(ValueError())
    future.resolve(2)
    assert future.result() == 1


def test_callbacks_run_once_before_and_after() -> None:
    future, seen = pending(), []
    future.add_done_callback(lambda f: seen.append(("early", f.result())))
    assert seen == []
    future.resolve(7)
    future.add_done_callback(lambda f: seen.append(("late", f.result())))
    assert seen == [("early", 7), ("late", 7)]


def test_a_raising_callback_is_logged_and_harmless(caplog: pytest.LogCaptureFixture) -> None:
    future, seen = pending(), []
    future.add_done_callback(lambda f: 1 / 0)
    future.add_done_callback(seen.append)
    future.resolve(1)
    assert seen == [future]
    assert "ZeroDivisionError" in caplog.text


def test_another_thread_waits_for_the_value() -> None:
    future, got = pending(), []
    thread = threading.Thread(target=lambda: got.append(future.result()))
    thread.start()
    future.resolve(5)
    thread.join(30)
    assert got == [5]


def test_another_thread_meets_its_deadline() -> None:
    future, errors = pending(), []

    def ask() -> None:
        try:
            future.result(timeout=0.01)
        except gs.CollectiveTimeout as error:
            errors.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(30)
    assert "0.01 s" in errors[0]
