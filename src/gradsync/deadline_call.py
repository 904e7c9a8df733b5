"""Calling what may hang and cannot be interrupted: a library that waits for other ranks in C, a file system."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

_LOOK_EVERY_SECONDS = 0.02

_Result = TypeVar("_Result")


def call_with_deadline(
    function: Callable[[], _Result], name: str, seconds: float, check: Callable[[], None] | None = None
) -> _Result:
    """Calls a function that may hang, on a daemon thread, which is left behind where it does.

    Args:
        function: what to call.
        name: of the thread.
        seconds: the deadline.
        check: called while waiting; what it raises ends the wait.

    Raises:
        TimeoutError: the deadline came first.
    """
    outcome: list[_Result] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    deadline = time.monotonic() + seconds
    threading.Thread(target=run, name=name, daemon=True).start()
    while not ended.wait(_LOOK_EVERY_SECONDS):
        if check is not None:
            check()
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{name} did not return within {seconds:g} s")
    if errors:
        raise errors[0]
    return outcome[0]
