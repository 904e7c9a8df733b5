"""Where a communicator's arrays live, for what times it: NumPy or CuPy, and how to wait for a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gradsync.communicators.communicator import Communicator


def array_module(communicator: Communicator) -> tuple[Any, Callable[[], None]]:
    """Returns the array module, and what waits for the work that was queued on the device."""
    if communicator.device == "cpu":
        return np, lambda: None
    import cupy

    cupy.cuda.Device(int(communicator.device.partition(":")[2] or 0)).use()
    return cupy, lambda: cupy.cuda.get_current_stream().synchronize()
