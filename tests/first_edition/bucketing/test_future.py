"""GradientFuture: not ready before it is, ready for ever after."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from gradsync.futures import CollectiveEnd, GradientFuture


def pending(value: Any = None) -> GradientFuture:
    return GradientFuture("'w'", CollectiveEnd(), value)


def resolve(future: GradientFuture, reduction: Any = None) -> None:
    future._end.finish(None, None, reduction)


@pytest.mark.parametrize("ask", ["shape", "dtype", "device"])
def test_attributes_are_not_ready_before_the_value_is(ask: str) -> None:
    with pytest.raises(gs.FutureNotReady, match="not ready"):
        getattr(pending(), ask)


@pytest.mark.parametrize("ask", ["numpy", "exception", "result", "wait"])
def test_methods_are_not_ready_before_the_value_is(ask: str) -> None:
    with pytest.raises(gs.FutureNotReady, match="'w'.*not ready"):
        getattr(pending(), ask)()


def test_resolved() -> None:
    value = np.ones((2, 3), np.float32)
    future = pending(value)
    assert not future.done()
    resolve(future)
    assert future.done()
    assert future.result() is value
    assert future.exception() is None
    assert future.numpy() is value
    assert (future.shape, future.dtype, str(future.device)) == ((2, 3), np.float32, "cpu")
    future.wait()
    assert "ready" in repr(future)


def test_failed() -> None:
    future, error = pending(), gs.RankFailed("rank 1 died", rank=1)
    future._end.finish(None, error)
    assert future.done()
    assert future.exception() is error
    future.wait()
    for ask in (future.result, future.numpy, lambda: future.shape):
        with pytest.raises(gs.RankFailed):
            ask()


def test_first_outcome_stays() -> None:
    future = pending(1)
    resolve(future)
    future._end.finish(None, ValueError())
    assert future.result() == 1


def test_callbacks_run_once_before_and_after() -> None:
    future, seen = pending(7), []
    future.add_done_callback(lambda f: seen.append(("early", f.result())))
    assert seen == []
    resolve(future)
    future.add_done_callback(lambda f: seen.append(("late", f.result())))
    assert seen == [("early", 7), ("late", 7)]


def test_a_raising_callback_is_logged_and_harmless(caplog: pytest.LogCaptureFixture) -> None:
    future, seen = pending(), []
    future.add_done_callback(lambda f: 1 / 0)
    future.add_done_callback(seen.append)
    resolve(future)
    assert seen == [future]
    assert "ZeroDivisionError" in caplog.text


def test_another_thread_waits_for_the_value() -> None:
    future, got = pending(5), []
    thread = threading.Thread(target=lambda: got.append(future.result()))
    thread.start()
    resolve(future)
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


# A reduction that runs beside the host.


class Reduction:
    """A Completion that ends when it is told to, and writes down what it is asked for."""

    has_host_results = False

    def __init__(self) -> None:
        self.over = False
        self.error: BaseException | None = None
        self.ordered: list[Any] = []
        self._callbacks: list[Callable[[], None]] = []

    def done(self) -> bool:
        return self.over

    def order(self, stream: Any = None) -> None:
        if self.error is not None:
            raise self.error
        self.ordered.append(stream)

    def wait(self, timeout_seconds: float | None = None) -> None:
        assert self.over, "who asks for the error of a future does not wait"
        if self.error is not None:
            raise self.error

    def when_done(self, function: Callable[[], None]) -> None:
        if self.over:
            function()
        else:
            self._callbacks.append(function)

    def end(self, error: BaseException | None = None) -> None:
        self.over, self.error = True, error
        for function in self._callbacks:
            function()


class DeviceArray:
    """What a future gives on a GPU."""

    shape, dtype, device = (2,), np.dtype(np.float32), "cuda:3"

    def get(self) -> str:
        return "in host memory"


def launched() -> tuple[GradientFuture, Reduction, DeviceArray]:
    reduction, array = Reduction(), DeviceArray()
    future = pending(array)
    resolve(future, reduction)
    return future, reduction, array


def test_a_launched_reduction_has_a_value_and_is_not_done() -> None:
    future, reduction, _ = launched()
    assert not future.done()
    assert (future.shape, future.dtype, future.device) == ((2,), np.float32, "cuda:3")
    with pytest.raises(gs.FutureNotReady, match="exception.*not ready"):
        future.exception()
    assert "pending" in repr(future)
    reduction.end()
    assert future.done()
    assert future.exception() is None
    assert "ready" in repr(future)


def test_results_order_streams_and_do_not_block() -> None:
    future, reduction, array = launched()
    assert future.result() is array
    future.wait()
    future.wait("a stream")
    assert not future.done()
    reduction.end()  # as the copy to host memory waits for it
    assert future.numpy() == "in host memory"
    assert reduction.ordered == [None, None, "a stream", None]


def test_a_reduction_that_failed_after_its_launch() -> None:
    future, reduction, _ = launched()
    error = gs.RankFailed("rank 1 died", rank=1)
    reduction.end(error)
    assert future.done()
    assert future.exception() is error
    future.wait()
    for ask in (future.result, future.numpy):
        with pytest.raises(gs.RankFailed):
            ask()
    assert "failed" in repr(future)


@pytest.mark.parametrize("error", [None, gs.RankFailed("rank 1 died")])
def test_callbacks_run_at_the_end_of_the_reduction(error: BaseException | None) -> None:
    future, reduction, seen = pending(), Reduction(), []
    future.add_done_callback(lambda f: seen.append(("before the launch", f.exception())))
    resolve(future, reduction)
    future.add_done_callback(lambda f: seen.append(("after the launch", f.exception())))
    assert seen == []
    reduction.end(error)
    future.add_done_callback(lambda f: seen.append(("after the end", f.exception())))
    assert seen == [("before the launch", error), ("after the launch", error), ("after the end", error)]
