"""CUDA source, as far as the stand-in can run it: the library's kernels, known by their names."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from ._elementwise import launch
from ._ndarray import ndarray
from .cuda._errors import INVALID_CONFIGURATION, INVALID_VALUE, SYMBOL_NOT_FOUND, CUDARuntimeError
from .cuda.memory import device_bytes

_CHUNK = np.dtype([("address", np.uint64), ("offset", np.uint64), ("size", np.uint64)])
_MAX_THREADS = 1024


def _pack_chunks(blocks: int, threads: int, chunks: int, flat: int) -> None:
    """Block i copies chunk i into the flat buffer."""
    for address, offset, size in _table(chunks, blocks):
        _move(flat + offset, address, size)


def _split_chunks(blocks: int, threads: int, chunks: int, flat: int) -> None:
    """Block i copies chunk i out of the flat buffer."""
    for address, offset, size in _table(chunks, blocks):
        _move(address, flat + offset, size)


# Each is called with the numbers of blocks and of threads in a block, and the arguments of its launch.
_KERNELS: dict[str, Callable[..., None]] = {
    "pack_chunks": _pack_chunks,
    "split_chunks": _split_chunks,
}


def _table(address: int, count: int) -> list[tuple[int, int, int]]:
    return device_bytes(address, count * _CHUNK.itemsize).view(_CHUNK).tolist()


def _move(target: int, source: int, size: int) -> None:
    if size:
        device_bytes(target, size), device_bytes(source, size)  # raise where a GPU would
        ctypes.memmove(target, source, size)


class RawModule:
    """A module of CUDA source.

    Args:
        code: the source.
        options: for the compiler.
    """

    def __init__(self, code: str | None = None, *, path: str | None = None, options: tuple[str, ...] = ()) -> None:
        if code is None or path is not None:
            raise TypeError("the stand-in needs `code`")
        if not isinstance(code, str) or not isinstance(options, tuple):
            raise TypeError("`code` must be str, `options` a tuple of str")
        self.code = code
        self.options = options

    def compile(self, log_stream: Any = None) -> None:
        """Nothing to do: NVRTC is not here."""

    def get_function(self, name: str) -> Callable[..., None]:
        """Returns a kernel by its name."""
        if name not in _KERNELS or name not in self.code:
            raise CUDARuntimeError(SYMBOL_NOT_FOUND)
        return _Kernel(_KERNELS[name])


class _Kernel:
    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], *, shared_mem: int = 0
    ) -> None:
        if min(grid) < 1 or min(block) < 1:
            raise CUDARuntimeError(INVALID_VALUE)
        if int(np.prod(block)) > _MAX_THREADS:
            raise CUDARuntimeError(INVALID_CONFIGURATION)
        arguments = [argument.data.ptr if isinstance(argument, ndarray) else int(argument) for argument in args]
        launch(self._function, grid[0], block[0], *arguments)
