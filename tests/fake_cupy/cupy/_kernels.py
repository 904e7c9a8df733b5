"""CUDA source, as far as the fake can run it: gradsync's kernels, known by their names."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
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


def _scale_chunks(dtype: Any, blocks: int, chunks: int, flat: int, factor: float, on_device: int) -> None:
    """Block i copies chunk i into the flat buffer, times the factor, or the float64 at an address."""
    dtype = np.dtype(dtype)
    wide = np.float32 if dtype.itemsize == 2 else dtype
    if on_device:
        factor = float(device_bytes(on_device, 8).view(np.float64)[0])
    for address, offset, size in _table(chunks, blocks):
        source, target = (device_bytes(at, size).view(dtype) for at in (address, flat + offset))
        with np.errstate(all="ignore"):
            target[:] = source.astype(wide) * np.dtype(wide).type(factor)


def _digest_pieces(blocks: int, words: int, count: int, sums: int) -> None:
    """Block i adds the sum of piece i."""
    target = device_bytes(sums, 8 * blocks).view(np.uint64)
    data = device_bytes(words, 8 * count).view(np.uint64)
    keys = [_digest_key(np.arange(first, first + 16384, dtype=np.uint64)) for first in (1, 16385)]
    for block in range(blocks):
        piece = data[block * 16384 : (block + 1) * 16384]
        low, high = piece & np.uint64(0xFFFFFFFF), piece >> np.uint64(32)
        target[block] += ((low + keys[0][: piece.size]) * (high + keys[1][: piece.size])).sum(dtype=np.uint64)


def _digest_key(number: np.ndarray) -> np.ndarray:
    key = number * np.uint64(0x9E3779B97F4A7C15)
    key = (key ^ key >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ key >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return key ^ key >> np.uint64(31)


_KERNELS: dict[str, Callable[..., None]] = {
    "pack_chunks": _pack_chunks,
    "split_chunks": _split_chunks,
    "digest_pieces": _digest_pieces,
    **{
        f"scale_{name}": functools.partial(_scale_chunks, dtype)
        for name, dtype in {
            "float16": np.float16,
            "bfloat16": ml_dtypes.bfloat16,
            "float32": np.float32,
            "float64": np.float64,
        }.items()
    },
}


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


def _value(argument: Any) -> int | float:
    if isinstance(argument, ndarray):
        return argument.data.ptr
    return argument if isinstance(argument, float) else int(argument)


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
