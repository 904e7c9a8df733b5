"""How fast this machine rewrites memory that another core has read.

Virtual machines were seen to flip, for seconds at a time, between two modes: one core rewrites lines that another has
read at 7 to 40 GB/s, or at 2 to 5. Everything between processes that share memory follows, so a benchmark
measures the speed before each block, and gives its medians by mode as well.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable

import numpy as np

# Fits the second-level cache of one core: the probe is about traffic between cores, not about main memory.
PROBE_BYTES = 2**20
REPEATS = 9
FAST = "fast"
SLOW = "slow"
# Between the two modes' nearest ends.
FAST_FROM_GB_PER_SECOND = 6.0


def mode_of(gb_per_second: float) -> str:
    """Returns the name of the mode in which memory is rewritten at that speed."""
    return FAST if gb_per_second >= FAST_FROM_GB_PER_SECOND else SLOW


def create_probe_memory() -> int:
    """Returns a descriptor of memory that two ranks can map: a buffer of PROBE_BYTES for each."""
    descriptor = os.memfd_create("memory-mode", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 2 * PROBE_BYTES)
    return descriptor


class MemoryProbe:
    """One of two ranks that read each other's buffer and then rewrite their own.

    Args:
        path: of the memory that create_probe_memory() made, as this process can open it.
        rank: 0 or 1.
        barrier: waits for the other rank.
    """

    def __init__(self, path: str, rank: int, barrier: Callable[[], object]) -> None:
        with open(path, "r+b") as file:
            mapping = mmap.mmap(file.fileno(), 2 * PROBE_BYTES)
        halves = np.frombuffer(mapping, np.float32).reshape(2, -1)
        self._own, self._others = halves[rank], halves[1 - rank]
        self._private = np.zeros_like(self._own)
        self._barrier = barrier

    def gb_per_second(self) -> float:
        """Returns how fast this rank rewrites memory that the other has just read. Both ranks must call it."""
        seconds = []
        for _ in range(REPEATS):
            self._barrier()
            np.copyto(self._private, self._others)
            self._barrier()
            began = time.perf_counter()
            # A ufunc stores as reductions do; memcpy may take the string instructions, which fetch no lines.
            np.positive(self._private, out=self._own)
            seconds.append(time.perf_counter() - began)
        return PROBE_BYTES / statistics.median(seconds) / 1e9
