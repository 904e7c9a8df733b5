"""CollectiveFuture: what waits, what does not, and who may ask. Values and callbacks: see bucketing/test_future.py."""

from __future__ import annotations

import copy
import pickle
import threading
import traceback
from typing import Any

import pytest

import gradsync as gs
from gradsync.futures import CollectiveEnd, CollectiveFuture

NAME = "rank 0/2: all_gather"


def pending() -> CollectiveFuture:
    return CollectiveFuture(NAME, CollectiveEnd())


def resolve(future: CollectiveFuture, value: object) -> None:
    future._end.finish(value, None)


def fail(future: CollectiveFuture, error: BaseException, untold: Any = None) -> None:
    future._end.finish(None, error, untold=untold)


def test_it_is_what_a_gradients_future_is() -> None:
    assert issubclass(gs.GradientFuture, gs.CollectiveFuture)
    assert gs.CollectiveFuture is CollectiveFuture


def test_it_has_no_exception_before_it_has_ended() -> None:
    with pytest.raises(gs.FutureNotReady, match=r"exception\(\) of rank 0/2: all_gather .* has not ended yet"):
        pending().exception()


def test_a_wait_has_its_own_deadline_and_leaves_the_collective_going() -> None:
    future = pending()
    with pytest.raises(gs.CollectiveTimeout, match=r"all_gather did not end within 0.01 s"):
        future.result(timeout=0.01)
    resolve(future, 3)
    assert future.result(timeout=0) == 3


def test_without_a_timeout_the_wait_is_the_collectives_own() -> None:
    future = pending()
    waiting = threading.Event()

    def ask() -> None:
        waiting.set()
        got.append(future.result())

    got: list[int] = []
    thread = threading.Thread(target=ask)
    thread.start()
    assert waiting.wait(10)
    resolve(future, 5)
    thread.join(10)
    assert got == [5]


def test_a_timeout_of_its_own() -> None:
    future = CollectiveFuture(NAME, CollectiveEnd(0.01))
    with pytest.raises(gs.CollectiveTimeout, match=r"0\.01 s"):
        future.wait()


def test_many_threads_wait_for_one_value() -> None:
    future = pending()
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(future.result(30))) for _ in range(8)]
    for thread in threads:
        thread.start()
    resolve(future, 7)
    for thread in threads:
        thread.join(30)
    assert got == [7] * 8


def test_disowned_it_fails_and_calls_nobody() -> None:
    future, seen = pending(), []
    future.add_done_callback(seen.append)
    error = gs.CommunicatorClosed("forked")
    future._end.disown(error)
    assert future.done()
    assert future.exception() is error
    resolve(future, 1)
    with pytest.raises(gs.CommunicatorClosed, match="forked"):
        future.result()
    assert seen == []


def test_disowned_after_its_end_it_keeps_its_value() -> None:
    future = pending()
    resolve(future, 1)
    future._end.disown(gs.CommunicatorClosed("forked"))
    assert future.result() == 1


def test_it_cannot_be_cancelled() -> None:
    assert not hasattr(CollectiveFuture, "cancel")


def test_it_says_what_it_is() -> None:
    future = pending()
    assert repr(future) == f"<CollectiveFuture of {NAME}: pending>"
    fail(future, gs.RankFailed("rank 1 died"))
    assert repr(future) == f"<CollectiveFuture of {NAME}: failed with RankFailed>"
    assert future.name == NAME


# -- Errors ----------------------------------------------------------------------------------------------------------


def failed() -> tuple[CollectiveFuture, gs.RankFailed]:
    """A future, and the error that it failed with, raised elsewhere."""
    future = pending()
    try:
        raise gs.RankFailed("rank 1 died", rank=1, phase="all_gather") from ValueError("the cause")
    except gs.RankFailed as error:
        fail(future, error)
        return future, error


def raised_by(future: CollectiveFuture) -> gs.RankFailed:
    with pytest.raises(gs.RankFailed) as caught:
        future.result()
    return caught.value


def test_wait_raises_as_result_does() -> None:
    future, _ = failed()
    with pytest.raises(gs.RankFailed, match="rank 1 died"):
        future.wait()


def test_every_ask_raises_an_error_of_its_own_that_says_the_same() -> None:
    future, error = failed()
    first, second = raised_by(future), raised_by(future)
    assert len({id(first), id(second), id(error)}) == 3
    for each in (first, second, pickle.loads(pickle.dumps(first)), copy.copy(second)):
        assert (type(each), str(each), each.rank, each.phase) == (gs.RankFailed, "rank 1 died", 1, "all_gather")
    assert isinstance(second.__cause__, ValueError)
    assert future.exception() is error


def test_tracebacks_do_not_grow_and_tell_where_it_was_raised_first() -> None:
    future, error = failed()
    before = len(traceback.extract_tb(error.__traceback__))
    lengths = {len(traceback.extract_tb(raised_by(future).__traceback__)) for _ in range(5)}
    assert len(lengths) == 1
    assert len(traceback.extract_tb(error.__traceback__)) == before
    assert "failed" in [frame.name for frame in traceback.extract_tb(raised_by(future).__traceback__)]


class Stubborn(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)


def test_an_error_that_cannot_be_copied_is_raised_itself() -> None:
    future, error = pending(), Stubborn(3, "as it is")
    fail(future, error)
    with pytest.raises(Stubborn) as caught:
        future.result()
    assert caught.value is error


# -- Callbacks -------------------------------------------------------------------------------------------------------


def test_a_callback_that_leaves_does_not_keep_the_others_from_being_called() -> None:
    future, seen = pending(), []

    def leave(_: CollectiveFuture) -> None:
        raise SystemExit(3)

    future.add_done_callback(leave)
    future.add_done_callback(seen.append)
    with pytest.raises(SystemExit, match="3"):
        resolve(future, 1)
    assert seen == [future]
    assert future.result() == 1


# -- Failures that nobody asks for -----------------------------------------------------------------------------------


class Untold:
    """Notes that it was told."""

    told = False

    def forget(self) -> None:
        self.told = True


def ask_result(future: CollectiveFuture) -> None:
    with pytest.raises(gs.RankFailed):
        future.result()


def ask_wait(future: CollectiveFuture) -> None:
    with pytest.raises(gs.RankFailed):
        future.wait()


@pytest.mark.parametrize("ask", [ask_result, ask_wait, CollectiveFuture.exception])
def test_who_asks_is_told(ask: object) -> None:
    future, untold = pending(), Untold()
    fail(future, gs.RankFailed("rank 1 died"), untold)
    assert "failed" in repr(future)
    assert not untold.told, "its repr is not for the program"
    ask(future)  # type: ignore[operator]
    assert untold.told


def test_a_failure_that_comes_second_is_nobodys() -> None:
    future, untold = pending(), Untold()
    resolve(future, 1)
    fail(future, gs.RankFailed("rank 1 died"), untold)
    assert untold.told
