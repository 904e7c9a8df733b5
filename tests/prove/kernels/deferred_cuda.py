"""A stand-in for the part of CuPy that FusedPacker uses, whose streams work only when they are told to.

Copies and kernels touch memory when their stream runs, not when they are called; freed memory goes at once to the next
allocation of its size (on a device: on the same stream), as in CuPy's pools. Memory that is given back or written
too early is thereby seen.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from gradsync.communicators.nccl.kernels import CHUNK


class Pool:
    """Memory by stream: the block freed last is given out first; a new block is filled with a pattern."""

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


class DeviceArray:
    def __init__(self, pool: Pool, stream: DeferredStream, nbytes: int) -> None:
        self._pool, self._key = pool, stream.ptr
        self._block = pool.take(self._key, nbytes)
        self.nbytes = nbytes
        self.data = SimpleNamespace(ptr=self._block.ctypes.data)

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
        self._pool = Pool()
        self.cuda = ModuleType("cupy.cuda")
        self.cuda.get_current_stream = lambda: self.stream

    def asarray(self, host: np.ndarray) -> DeviceArray:
        """Copies it when the stream comes to that, from a copy of its own, as CuPy does by way of pinned memory."""
        assert host.dtype == np.uint8
        array, held = DeviceArray(self._pool, self.stream, host.nbytes), host.tobytes()
        self.uploads += bool(held)
        address = array.data.ptr
        self.stream.enqueue(lambda: ctypes.memmove(address, held, len(held)) and None)
        return array

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
