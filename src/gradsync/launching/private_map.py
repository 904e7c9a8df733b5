"""A file in memory, mapped without holding a descriptor: the system grants a process about a thousand of those."""

from __future__ import annotations

import ctypes
import mmap
import os

_MAP_FIXED = 0x10  # Source: include/uapi/asm-generic/mman-common.h; the mmap module does not have it
_FAILED = ctypes.c_void_p(-1).value


def map_privately(file: int, size_bytes: int) -> mmap.mmap:
    """Maps a file so that a write copies a page, which the file does not see.

    `mmap.mmap(file)` would keep a descriptor of its own until the last array in it is gone.

    Args:
        file: descriptor of the file; may be closed afterwards.
        size_bytes: of the file; one at least.

    Raises:
        OSError: there is no room for it.
    """
    place = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # unmapped with the last view
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    address = ctypes.addressof(ctypes.c_char.from_buffer(place))
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    if libc.mmap(address, size_bytes, protection, flags, file, 0) == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return place
