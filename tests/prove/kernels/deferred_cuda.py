"""A stand-in for the part of CuPy that FusedPacker uses, whose streams work only when they are told to.

Copies and kernels touch memory when their stream runs, not when they are called; freed memory goes at once to the next
allocation of its size (on a device: on the same stream), as in CuPy's pools. Memory that is given back or written
too early is thereby seen.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from gradsync.communicators.nccl.kernels import CHUNK


class Pool:
    """Memory by key: what was freed last is given out first, filled with a pattern when it is new."""

    def __init__(self) -> None:
        self._free: dict[Any, list[np.ndarray]] = {}

    def take(self, key: Any, size: int) -> np.ndarray:
        free = self._free.get((key, size))
        return free.pop() if free else np.full(size, 0xFF, np.uint8)

    def give_back(self, key: Any, block: np.ndarray) -> None:
        self._free.setdefault((key, block.size), []).append(block)


class DeferredStream:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr
        self._work: deque[Callable[[], None]] = deque()

    def enqueue(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def run(self, count: int | None = None) -> None:
        """Does the next `count` pieces of work, or all."""
        for _ in range(len(self._work) if count is None else min(count, len(self._work))):
            self._work.popleft()()


class DeferredEvent:
    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.done = True

    def record(self, stream: DeferredStream) -> None:
        self.done = False
        stream.enqueue(lambda: setattr(self, "done", True))


class MemoryPointer:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def copy_from_host_async(self, source: ctypes.c_void_p, size: int, stream: DeferredStream) -> None:
        to, come_from = self.ptr, source.value
        stream.enqueue(lambda: ctypes.memmove(to, come_from, size) and None)


class DeviceArray:
    def __init__(self, pool: Pool, stream: DeferredStream, nbytes: int) -> None:
        self._pool, self._key = pool, stream.ptr
        self._block = pool.take(self._key, nbytes)
        self.nbytes = nbytes
        self.data = MemoryPointer(self._block.ctypes.data)

    def __del__(self) -> None:
        self._pool.give_back(self._key, self._block)


class Launch(NamedTuple):
    kernel: str
    stream: int
    threads: int
    flat: Any
    rows: np.ndarray  # the table as the kernel saw it


class DeferredCupy(ModuleType):
    """What `import cupy` gives in the tests of FusedPacker."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.stream = DeferredStream(0)
        self.launches: list[Launch] = []  # those that have run
        self.queued = 0
        self.uploads = 0
        self._device_pool, self._pinned_pool = Pool(), Pool()
        self.cuda = ModuleType("cupy.cuda")
        self.cuda.get_current_stream = lambda: self.stream
        self.cuda.Event = DeferredEvent
        self.cuda.alloc_pinned_memory = self._alloc_pinned

    def empty(self, size: int, dtype: type) -> DeviceArray:
        assert dtype is np.uint8
        return DeviceArray(self._device_pool, self.stream, size)

    def RawModule(self, *, code: str) -> DeferredCupy:  # noqa: N802 - CuPy's name
        assert "pack_chunks" in code
        return self

    def get_function(self, name: str) -> Callable[..., None]:
        def call(grid: tuple[int], block: tuple[int], args: tuple[DeviceArray, Any]) -> None:
            table, flat = args
            stream, address, count = self.stream, table.data.ptr, grid[0]
            assert count * CHUNK.itemsize <= table.nbytes
            self.queued += 1

            def run() -> None:
                rows = np.frombuffer(ctypes.string_at(address, count * CHUNK.itemsize), CHUNK)
                self.launches.append(Launch(name, stream.ptr, block[0], flat, rows))

            stream.enqueue(run)

        return call

    def _alloc_pinned(self, size: int) -> Any:
        self.uploads += 1
        pool = self._pinned_pool
        block = pool.take("pinned", size)

        def give_back(_: Any) -> None:
            pool.give_back("pinned", block)

        pinned = type("Pinned", (ctypes.c_char * size,), {"__del__": give_back}).from_buffer(block)
        pinned.ptr = block.ctypes.data
        return pinned
