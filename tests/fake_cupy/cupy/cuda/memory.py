"""Device memory: ordinary memory with real addresses, and the pool that hands it out as CuPy's does."""

from __future__ import annotations

import bisect
import ctypes
import threading
from collections import defaultdict
from typing import Any

import numpy as np

from . import pinned_memory
from ._devices import all_devices, current_device
from ._errors import ILLEGAL_ADDRESS, INVALID_VALUE, CUDARuntimeError
from .device import Device
from .stream import current_queue

_ROUNDING_BYTES = 512


class Block:
    """A range of memory of one device; it begins as NaNs in any floating dtype, for use before initialisation shows.

    Args:
        size: bytes.
        device_id: where.
        stream_ptr: the stream whose allocations may reuse it.
    """

    def __init__(self, size: int, device_id: int, stream_ptr: int) -> None:
        memory = np.full(size + _ROUNDING_BYTES, 0xFF, np.uint8)
        begin = -memory.ctypes.data % _ROUNDING_BYTES
        self.bytes = memory[begin : begin + size]
        self.address: int = self.bytes.ctypes.data
        self.size = size
        self.device_id = device_id
        self.stream_ptr = stream_ptr

    def poison(self) -> None:
        """Fills it with NaNs: its next user must write before reading, and nobody else may use it."""
        self.bytes.fill(0xFF)


class _AddressSpace:
    """Which addresses are device memory: added by threads that allocate while the streams' threads look them up."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._addresses: list[int] = []
        self._lock = threading.Lock()

    def add(self, block: Block) -> None:
        with self._lock:
            self._blocks[block.address] = block
            bisect.insort(self._addresses, block.address)

    def remove(self, block: Block) -> None:
        with self._lock:
            del self._blocks[block.address]
            self._addresses.remove(block.address)

    def find(self, address: int, size: int) -> Block | None:
        """Returns the block that holds the range, or None."""
        with self._lock:
            index = bisect.bisect_right(self._addresses, address) - 1
            if index < 0:
                return None
            block = self._blocks[self._addresses[index]]
        return block if address + size <= block.address + block.size else None


address_space = _AddressSpace()


def device_bytes(address: int, size: int) -> np.ndarray:
    """Returns the bytes at an address, as work on a stream finds them; a wrong address is the device's error."""
    block = address_space.find(address, size)
    if block is None:
        raise CUDARuntimeError(ILLEGAL_ADDRESS)
    begin = address - block.address
    return block.bytes[begin : begin + size]


class BaseMemory:
    """The memory of a MemoryPointer: an address, a size and a device.

    Args:
        ptr: address.
        size: bytes.
        device_id: where.
        block: that holds it; None if it is empty.
    """

    def __init__(self, ptr: int, size: int, device_id: int, block: Block | None) -> None:
        self.ptr = ptr
        self.size = size
        self.device_id = device_id
        self.block = block

    @property
    def device(self) -> Device:
        return Device(self.device_id)


class UnownedMemory(BaseMemory):
    """Memory that something else keeps alive.

    Args:
        ptr: address.
        size: bytes.
        owner: what keeps it alive.
        device_id: where; by default found out.
    """

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        block = address_space.find(ptr, size)
        if block is None or device_id not in (-1, block.device_id):
            raise CUDARuntimeError(INVALID_VALUE)
        super().__init__(ptr, size, block.device_id, block)
        self._owner = owner


class PooledMemory(BaseMemory):
    """A block on loan; the end of this object returns it, whatever is still queued for it."""

    def __init__(self, pool: MemoryPool, block: Block, size: int) -> None:
        super().__init__(block.address, size, block.device_id, block)
        self._pool = pool

    def __del__(self) -> None:
        self._pool._release(self.block)


class MemoryPool:
    """Blocks by device, stream and rounded size; a returned block goes to the next allocation like it, at once."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[int, int, int], list[Block]] = defaultdict(list)
        self._total_bytes = 0

    def malloc(self, size: int) -> MemoryPointer:
        """Returns memory for the current stream."""
        device_id, stream = current_device().device_id, current_queue()
        stream.device.check()
        if size == 0:
            return MemoryPointer(BaseMemory(0, 0, device_id, None), 0)
        rounded = -(-size // _ROUNDING_BYTES) * _ROUNDING_BYTES
        try:
            block = self._free[device_id, stream.ptr, rounded].pop()
            if stream.capture is None:
                stream.submit(block.poison)  # shows to whatever other stream still uses it
        except IndexError:
            block = Block(rounded, device_id, stream.ptr)
            address_space.add(block)
            self._total_bytes += rounded
        return MemoryPointer(PooledMemory(self, block, size), 0)

    def free_all_blocks(self, stream: Any = None) -> None:
        """Unmaps free blocks, of one stream or of all; waits for the devices, as cudaFree does."""
        for device in all_devices():
            device.synchronize()
        for (_, stream_ptr, _), blocks in list(self._free.items()):
            while blocks and (stream is None or stream.ptr == stream_ptr):
                block = blocks.pop()
                address_space.remove(block)
                self._total_bytes -= block.size

    def total_bytes(self) -> int:
        return self._total_bytes

    def free_bytes(self) -> int:
        return sum(block.size for blocks in list(self._free.values()) for block in blocks)

    def _release(self, block: Block) -> None:
        # Runs whenever an array is collected, in any thread: appending to a list needs no lock.
        self._free[block.device_id, block.stream_ptr, block.size].append(block)


class MemoryPointer:
    """A place in memory.

    Args:
        mem: the memory.
        offset: bytes from its beginning.
    """

    def __init__(self, mem: BaseMemory, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset
        self.device_id = mem.device_id

    @property
    def device(self) -> Device:
        return Device(self.device_id)

    def __int__(self) -> int:
        return self.ptr

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def __repr__(self) -> str:
        return f"<MemoryPointer 0x{self.ptr:x} device={self.device_id} mem={self.mem!r}>"

    def host_view(self, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None) -> np.ndarray:
        """Returns a view for work on a stream; it keeps the memory mapped, but not allocated."""
        block = self.mem.block
        if block is None:
            return np.ndarray(shape, dtype, strides=strides)
        return np.ndarray(shape, dtype, block.bytes, self.ptr - block.address, strides)

    def copy_from_host_async(self, mem: Any, size: int, stream: Any = None) -> None:
        """Copies from an address of the host: pinned memory is read when the stream gets there, other memory now."""
        source = host_bytes(mem, size)
        if not pinned_memory.is_pinned(source.ctypes.data, size):
            source = source.copy()
        self._copy(device_bytes(self.ptr, size), source, stream)

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Any = None) -> None:
        """Copies from another place in device memory."""
        self._copy(device_bytes(self.ptr, size), device_bytes(src.ptr, size), stream)

    @staticmethod
    def _copy(target: np.ndarray, source: Any, stream: Any) -> Any:
        queue = current_queue() if stream is None else stream._queue()
        return queue.submit(lambda: np.copyto(target, source))


def host_bytes(mem: Any, size: int) -> np.ndarray:
    """Returns memory of the host, given its address as a c_void_p or a number."""
    address = mem.value if isinstance(mem, ctypes.c_void_p) else int(mem)
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


default_pool = MemoryPool()


def alloc(size: int) -> MemoryPointer:
    """Returns memory of the pool, for the current stream."""
    return default_pool.malloc(size)
