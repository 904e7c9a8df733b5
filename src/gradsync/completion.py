"""When a collective that runs beside the host has ended: what a future holds between launch and result.

On the CPU a collective has ended when its call returns, and there is no Completion. On a GPU the call returns when the
work is queued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Completion(Protocol):
    """The end of one launched collective. Once it has failed, order() and wait() raise what ended it."""

    def done(self) -> bool:
        """Whether it has ended, or failed; never waits for the device."""

    def order(self, stream: Any = None) -> None:
        """Makes a stream wait for it, without blocking the host.

        Results that belong in host memory are waited for, and are there afterwards.

        Args:
            stream: a CUDA stream; None is the current one.
        """

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Blocks the host until it has ended.

        Args:
            timeout_seconds: bounds this wait only; None leaves it to the collective's own deadline.

        Raises:
            CollectiveTimeout: the deadline came first.
        """

    def before_done(self, function: Callable[[], None]) -> None:
        """Calls function() once it has ended, before done() is True, on any thread; at once where it is True already.

        What function raises is what the collective has failed with.
        """

    def when_done(self, function: Callable[[BaseException | None], None]) -> None:
        """Calls function(error or None) once it has ended, on a thread of the communicator."""
