"""Device memory and pinned memory: ordinary memory, and the pools that hand it out as CuPy's do."""

from __future__ import annotations

import bisect
import ctypes
import functools
import threading
from collections import defaultdict
from typing import Any

import numpy as np

from ._devices import contexts, current_device
from ._errors import ILLEGAL_ADDRESS, INVALID_VALUE, CUDARuntimeError
from .stream import current_queue

_ROUNDING_BYTES = 512


class Block:
    """A range of memory of one device; it begins as NaNs in any floating dtype.

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
        self.size, self.device_id, self.stream_ptr = size, device_id, stream_ptr

    def poison(self) -> None:
        """Fills it with NaNs: its next user must write before reading, and nobody else may use it."""
        self.bytes.fill(0xFF)


_blocks: dict[int, Block] = {}  # by address; never unmapped
_addresses: list[int] = []
_looking = threading.Lock()  # streams look addresses up while the program allocates


def find_block(address: int, size: int) -> Block | None:
    """The block that holds the range; None if it is not device memory."""
    with _looking:
        index = bisect.bisect_right(_addresses, address) - 1
        block = _blocks[_addresses[index]] if index >= 0 else None
    return block if block is not None and address + size <= block.address + block.size else None


def device_bytes(address: int, size: int) -> np.ndarray:
    """The bytes at an address, as work on a stream finds them; a wrong address is the device's error."""
    block = find_block(address, size)
    if block is None:
        raise CUDARuntimeError(ILLEGAL_ADDRESS)
    return block.bytes[address - block.address :][:size]


class UnownedMemory:
    """A range of device memory that something else keeps.

    Args:
        ptr: address.
        size: bytes.
        owner: what keeps it alive.
        device_id: where; by default found out.
    """

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        block = find_block(ptr, size) if size else None
        if size and (block is None or device_id not in (-1, block.device_id)):
            raise CUDARuntimeError(INVALID_VALUE)
        self.ptr, self.size, self.block, self._owner = ptr, size, block, owner
        self.device_id = device_id if block is None else block.device_id


class _Loan:
    """A block of the pool; the end of this object returns it, whatever is still queued for it."""

    def __init__(self, block: Block) -> None:
        self._block = block

    def __del__(self) -> None:  # in any thread, whenever an array is collected: appending to a list needs no lock
        _free[self._block.device_id, self._block.stream_ptr, self._block.size].append(self._block)


_free: defaultdict[tuple[int, int, int], list[Block]] = defaultdict(list)  # by device, stream and rounded size


class MemoryPointer:
    """An address in memory.

    Args:
        mem: the memory.
        offset: bytes from its beginning.
    """

    def __init__(self, mem: UnownedMemory, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def host_view(self, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None) -> np.ndarray:
        """A view for work on a stream; it keeps the memory mapped, but not allocated."""
        block = self.mem.block
        if block is None:
            return np.ndarray(shape, dtype, strides=strides)
        return np.ndarray(shape, dtype, block.bytes, self.ptr - block.address, strides)

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Any = None) -> None:
        """Copies from another address in device memory."""
        target, source = device_bytes(self.ptr, size), device_bytes(src.ptr, size)
        (current_queue() if stream is None else stream._queue()).submit(lambda: np.copyto(target, source))


def alloc(size: int) -> MemoryPointer:
    """Memory for the current stream: at once that of an array of the same stream that was just dropped."""
    device_id, stream = current_device().device_id, current_queue()
    contexts.add(device_id)
    stream.device.check()
    if size == 0:
        return MemoryPointer(UnownedMemory(0, 0, None, device_id), 0)
    rounded = -(-size // _ROUNDING_BYTES) * _ROUNDING_BYTES
    try:
        block = _free[device_id, stream.ptr, rounded].pop()
        if stream.capture is None:
            stream.submit(block.poison)  # shows to whatever other stream still uses it
    except IndexError:
        block = Block(rounded, device_id, stream.ptr)
        with _looking:
            _blocks[block.address] = block
            bisect.insort(_addresses, block.address)
    return MemoryPointer(UnownedMemory(block.address, size, _Loan(block)), 0)


# -- Pinned memory: copies from and to it are asynchronous, and its pool, too, gives freed memory away at once ---------

_pinned: dict[int, bytearray] = {}  # by address; never unmapped
_free_pinned: defaultdict[int, list[bytearray]] = defaultdict(list)  # by size


class _Pinned:
    """The attributes of a PinnedMemoryPointer, beside its bytes."""

    storage: bytearray
    ptr: int

    def size(self) -> int:
        """The bytes that there are: as many as were asked for, rounded up."""
        return len(self.storage)

    def __del__(self) -> None:
        _free_pinned[len(self.storage)].append(self.storage)


@functools.cache
def _pointer_type(size: int) -> type:
    """A type with the buffer protocol, which a class in Python cannot have by itself before 3.12."""
    return type("PinnedMemoryPointer", (_Pinned, ctypes.c_uint8 * size), {})


def alloc_pinned_memory(size: int) -> _Pinned:
    """Pinned memory; np.frombuffer needs its `count`, because there may be more."""
    rounded = 1 << (max(size, _ROUNDING_BYTES) - 1).bit_length()
    try:
        storage = _free_pinned[rounded].pop()
    except IndexError:
        storage = bytearray(b"\xff" * rounded)
    pointer = _pointer_type(rounded).from_buffer(storage)
    pointer.storage, pointer.ptr = storage, ctypes.addressof(pointer)
    _pinned[pointer.ptr] = storage
    return pointer


def is_pinned(array: np.ndarray) -> bool:
    """Whether a host array's memory is pinned."""
    begin, end = array.ctypes.data, array.ctypes.data + array.nbytes
    return any(address <= begin and end <= address + len(held) for address, held in list(_pinned.items()))


def unowned(array: np.ndarray) -> np.ndarray:
    """The same memory, which this does not keep: cudaMemcpyAsync knows an address, and not whose it is.

    Source: CuPy, cupy/cuda/pinned_memory.pyx: what is collected goes back to its pool, whatever is queued for it.
    """
    room = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    return np.ndarray(array.shape, array.dtype, room, strides=array.strides)
