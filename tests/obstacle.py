"""Holds up a CUDA stream until the host lets it go, so that a test decides in which order the host and a GPU get on.

    obstacle = Obstacle(stream)       # whatever is queued on the stream from here on waits
    ...
    obstacle.lift()

On a GPU a kernel spins on a flag in pinned memory. On the fake CuPy a host function waits. With the real CuPy over host
memory no stream lags behind the host, so an obstacle holds nothing up: see `holds`.
"""

from __future__ import annotations

import os
import threading
from typing import Any

SECONDS = 20.0  # after which it lifts itself, so that a test that fails does not block the GPU

_SPIN = r"""
extern "C" __global__ void spin(const volatile int* lifted, unsigned long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (!*lifted && now - begin < nanoseconds);
}
"""
_flags: list[Any] = []  # pinned memory is not freed: the kernel may look at it after its test has ended


class Obstacle:
    """One obstacle on one stream.

    Args:
        stream: the CuPy stream; the current device must be its device.

    Attributes:
        holds: whether the stream really waits.
    """

    def __init__(self, stream: Any) -> None:
        import cupy

        self.holds = "HOST_CUDA_BUILD" not in os.environ
        self._event = threading.Event()
        self._flag: Any = None
        if not self.holds:
            return
        if not hasattr(cupy, "RawKernel"):  # the fake CuPy runs no kernels
            stream.launch_host_func(lambda _: self._event.wait(SECONDS), None)
            return
        import numpy as np

        pinned = cupy.cuda.alloc_pinned_memory(4)
        self._flag = np.frombuffer(pinned, np.int32, 1)
        self._flag[0] = 0
        _flags.append(pinned)
        spin = cupy.RawKernel(_SPIN, "spin")
        with stream:
            # Pinned memory has the same address on the device.
            spin((1,), (1,), (np.uint64(pinned.ptr), np.uint64(SECONDS * 1e9)))

    def lift(self) -> None:
        """Lets the stream go on; once is enough."""
        self._event.set()
        if self._flag is not None:
            self._flag[0] = 1

    def __enter__(self) -> Obstacle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.lift()
