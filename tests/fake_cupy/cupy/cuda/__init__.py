"""CUDA as CuPy shows it: devices, streams, events and memory. cupy.cuda.nccl is imported on its own, as in CuPy 14."""

from . import memory, pinned_memory, runtime, stream
from .device import Device
from .memory import MemoryPointer, MemoryPool, UnownedMemory, alloc
from .pinned_memory import alloc_pinned_memory
from .stream import Event, ExternalStream, Stream, get_current_stream, get_elapsed_time

__all__ = [
    "Device",
    "Event",
    "ExternalStream",
    "MemoryPointer",
    "MemoryPool",
    "Stream",
    "UnownedMemory",
    "alloc",
    "alloc_pinned_memory",
    "get_current_stream",
    "get_elapsed_time",
    "is_available",
    "memory",
    "pinned_memory",
    "runtime",
    "stream",
]


def is_available() -> bool:
    """Returns whether there is a device."""
    try:
        return runtime.getDeviceCount() > 0
    except runtime.CUDARuntimeError:
        return False
