"""A signal at any point of a call."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable
from typing import Any


def interrupted(
    function: Callable[[], Any],
    number: int,
    *,
    ends: tuple[type[BaseException], ...],
    by: signal.Signals = signal.SIGINT,
    handle: Callable[..., Any] = signal.default_int_handler,
) -> bool:
    """Calls a function, with a signal at the n-th point where Python looks for signals; whether it came there.

    Python looks as a function of Python begins, and after a call has returned.

    Args:
        function: what is called.
        number: of the point, from 1.
        ends: the errors that the function may end with.
        by: the signal.
        handle: its handler.
    """
    count = 0

    def strike(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "return", "c_return", "c_exception")
        if count == number:
            sys.setprofile(None)
            signal.raise_signal(by)

    gc.disable()  # what a handler raises in a destructor is lost
    kept = signal.signal(by, handle)
    sys.setprofile(strike)
    try:
        function()
    except ends:
        pass
    finally:
        sys.setprofile(None)
        signal.signal(by, kept)
        gc.enable()
    return count >= number
