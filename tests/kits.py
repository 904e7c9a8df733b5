"""What checks on ranks need: arrays by kit, the device at rest, an end together, Ctrl-C. For ranks: no pytest here."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import gradsync as gs
from contract import KITS
from gradsync import process_group


class MixedKit:
    """Arrays by turns in host memory and on the GPU; two ranks take different turns."""

    def __init__(self, rank: int) -> None:
        self._kits = [KITS["numpy"](), KITS["cupy"]()]
        self._turn = rank

    def put(self, values: np.ndarray[Any, Any]) -> Any:
        self._turn += 1
        return self._kits[self._turn % 2].put(values)

    def get(self, array: Any) -> np.ndarray[Any, Any]:
        return self._kits[not isinstance(array, np.ndarray)].get(array)


def make_kit(comm: Any, name: str) -> Any:
    """Returns the kit "numpy", "cupy" or "mixed"."""
    return MixedKit(comm.rank) if name == "mixed" else KITS[name]()


def bring_to_rest(comm: Any) -> None:
    """Waits until the GPU has done its work, if there is one."""
    if comm.device != "cpu":
        import cupy

        cupy.cuda.runtime.deviceSynchronize()


def values_of(future: Any, kit: Any) -> np.ndarray[Any, Any]:
    return kit.get(future.result())


def end_together(comm: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Calls function(comm, *args), and returns its result when all ranks have come to their end, or failed.

    On the stand-in rank 0 serves the collectives: were it to leave first, others might miss their last results, also
    those that nobody has asked for.
    """
    result = function(comm, *args)
    client = process_group._client
    if client is not None and not comm.closed:
        if os.environ.get("FAKE_CUPY_HANG") != "1":
            bring_to_rest(comm)
        with contextlib.suppress(gs.GradsyncError):
            client.barrier("the end of the check", timeout_seconds=30.0)
    return result


def interrupt(function: Callable[[], Any], number: int) -> bool:
    """Calls a function, with Ctrl-C at the n-th place where Python looks for signals; returns whether it came there.

    Python looks as a function of Python begins, and after a call has returned.
    """
    count = 0

    def strike(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "return", "c_return", "c_exception")
        if count == number:
            signal.raise_signal(signal.SIGINT)

    gc.disable()  # Python forgets what Ctrl-C raises in a destructor
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.setprofile(strike)
    try:
        function()
    except (KeyboardInterrupt, gs.CollectiveTimeout, gs.RendezvousTimeout, gs.RankFailed):
        pass
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGINT, previous)
        gc.enable()
    return count >= number
