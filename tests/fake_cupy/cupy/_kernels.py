"""CUDA source, as far as the fake can run it: gradsync's kernels, known by their names."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from ._array import launch, ndarray
from .cuda._errors import INVALID_CONFIGURATION, INVALID_VALUE, SYMBOL_NOT_FOUND, CUDARuntimeError
from .cuda.memory import device_bytes

_CHUNK = np.dtype([("address", np.uint64), ("offset", np.uint64), ("size", np.uint64)])
_MAX_THREADS = 1024


def _pack_chunks(blocks: int, chunks: int, flat: int) -> None:
    """Block i copies chunk i into the flat buffer."""
    for address, offset, size in _table(chunks, blocks):
        _move(flat + offset, address, size)


def _split_chunks(blocks: int, chunks: int, flat: int) -> None:
    """Block i copies chunk i out of the flat buffer."""
    for address, offset, size in _table(chunks, blocks):
        _move(address, flat + offset, size)


_KERNELS: dict[str, Callable[..., None]] = {"pack_chunks": _pack_chunks, "split_chunks": _split_chunks}


def _table(address: int, count: int) -> list[tuple[int, int, int]]:
    return device_bytes(address, count * _CHUNK.itemsize).view(_CHUNK).tolist()


def _move(target: int, source: int, size: int) -> None:
    if size:
        device_bytes(target, size), device_bytes(source, size)  # raise where a GPU would
        ctypes.memmove(target, source, size)


class RawModule:
    """A module of CUDA source."""

    def __init__(self, *, code: str, options: tuple[str, ...] = ()) -> None:
        self.code = code

    def get_function(self, name: str) -> Callable[..., None]:
        """A kernel by its name."""
        if name not in _KERNELS or name not in self.code:
            raise CUDARuntimeError(SYMBOL_NOT_FOUND)
        return _Kernel(_KERNELS[name])


def _value(argument: Any) -> int:
    return argument.data.ptr if isinstance(argument, ndarray) else int(argument)


class _Kernel:
    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        if min(grid) < 1 or min(block) < 1:
            raise CUDARuntimeError(INVALID_VALUE)
        if int(np.prod(block)) > _MAX_THREADS:
            raise CUDARuntimeError(INVALID_CONFIGURATION)
        arguments = [_value(argument) for argument in args]
        launch(self._function, grid[0], *arguments)
