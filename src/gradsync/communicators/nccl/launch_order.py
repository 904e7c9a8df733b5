"""One order for the launches of all NCCL communicators on a GPU.

A collective holds a part of the GPU while it waits for the other ranks. Two of different communicators that run side by
side on one rank, and in the other order on another, may each keep out the one that the other waits for. So they run in
the order in which the host has launched them. Source: NCCL's documentation, "Using multiple NCCL communicators
concurrently".
"""

from __future__ import annotations

import threading
from typing import Any


class LaunchOrder:
    """What was launched last on a device, by whichever communicator of this process."""

    def __init__(self) -> None:
        # The event of its end, its stream, and the thread: Stream.ptds is one object, and a stream for each thread.
        self._last: tuple[Any, Any, int] | None = None

    def follow(self, stream: Any) -> None:
        """Makes a stream wait for the launch before."""
        last = self._last
        if last is not None and (last[1] is not stream or last[2] != threading.get_ident()):
            stream.wait_event(last[0])

    def note(self, ended: Any, stream: Any) -> None:
        """Enters a launch, by the event that was recorded after it."""
        self._last = ended, stream, threading.get_ident()

    def forget(self, ended: Any) -> None:
        """Lets go of a launch that has ended, if it was the last one."""
        last = self._last
        if last is not None and last[0] is ended:
            self._last = None


_orders: dict[int, LaunchOrder] = {}


def launch_order(device_id: int) -> LaunchOrder:
    """Returns the order of a device's launches."""
    return _orders.setdefault(device_id, LaunchOrder())
