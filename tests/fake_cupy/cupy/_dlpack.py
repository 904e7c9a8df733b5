"""DLPack: capsules made by NumPy and marked as device memory; versioned capsules on request, as in CuPy 14."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from .cuda.memory import MemoryPointer, UnownedMemory
from .cuda.stream import Stream, get_current_stream

CPU, CUDA = 1, 2
_BFLOAT, _UINT = 4, 1
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
_NAME, _VERSIONED_NAME = b"dltensor", b"dltensor_versioned"
_VERSIONED_HEAD_BYTES = 32  # two numbers of the version, manager_ctx, deleter and flags


class _Tensor(ctypes.Structure):
    """The beginning of DLManagedTensor. Source: dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
    )


class _Exported:
    """Memory for NumPy to describe; it keeps the array alive, and with it the loan of its memory."""

    def __init__(self, array: Any, dtype: np.dtype) -> None:
        self._array = array
        self.__array_interface__ = array._host.view(dtype).__array_interface__


class _Imported:
    """A capsule as an object that NumPy takes in."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule


def _tensor_of(capsule: Any) -> _Tensor:
    if _is_valid(capsule, _VERSIONED_NAME):
        return _Tensor.from_address(_pointer_of(capsule, _VERSIONED_NAME) + _VERSIONED_HEAD_BYTES)
    return _Tensor.from_address(_pointer_of(capsule, _NAME))


def export(array: Any, stream: Any, max_version: Any, dl_device: Any, copy: Any) -> Any:
    """A capsule, once the consumer's stream waits for the current one."""
    if dl_device is not None and dl_device[0] == CPU:
        return array.get().__dlpack__()
    if stream == 0:
        raise ValueError("stream 0 is ambiguous in DLPack: 1 is the legacy default stream, 2 the per-thread one")
    if stream != -1:
        ptr = 1 if stream is None else stream
        consumer = Stream.from_external(SimpleNamespace(__cuda_stream__=lambda: (0, ptr)))
        consumer.wait_event(get_current_stream().record())
    is_bfloat = array.dtype == ml_dtypes.bfloat16
    capsule = np.asarray(_Exported(array, np.dtype(np.uint16) if is_bfloat else array.dtype)).__dlpack__(
        max_version=max_version
    )
    tensor = _tensor_of(capsule)
    tensor.device_type, tensor.device_id = CUDA, array.data.device_id
    tensor.code = _BFLOAT if is_bfloat else tensor.code
    return capsule


def from_dlpack(array: Any, *, device: Any = None, copy: Any = None) -> Any:
    """A view of an array in device memory, whichever library made it; it may be written to in any case.

    Source: CuPy, cupy/_core/dlpack.pyx: the read-only flag is ignored.
    """

    device_type, device_id = array.__dlpack_device__()
    if device_type != CUDA:
        raise TypeError("CPU arrays cannot be directly imported to CuPy. Use `cupy.array(numpy.from_dlpack(input))`.")
    stream = get_current_stream(device_id).ptr or 1
    try:
        capsule = array.__dlpack__(stream=stream, max_version=(1, 0), copy=copy)
    except TypeError:  # of a library before DLPack 1.0
        capsule = array.__dlpack__(stream=stream)
    tensor = _tensor_of(capsule)
    is_bfloat = tensor.code == _BFLOAT
    tensor.device_type, tensor.device_id = CPU, 0
    tensor.code = _UINT if is_bfloat else tensor.code
    host = np.from_dlpack(_Imported(capsule))
    host = host.view(ml_dtypes.bfloat16) if is_bfloat else host
    return view_of_foreign(host.ctypes.data, host.shape, host.dtype, host.strides, host, device_id)


def view_of_foreign(
    ptr: int, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None, owner: Any, device_id: int = -1
) -> Any:
    """An array over memory that something else keeps."""
    from ._array import ndarray

    if 0 in shape:
        return ndarray(shape, dtype)
    if strides is None:
        extent = int(np.prod(shape)) * dtype.itemsize
    else:
        extent = sum((n - 1) * step for n, step in zip(shape, strides, strict=True) if step > 0) + dtype.itemsize
    return ndarray(shape, dtype, MemoryPointer(UnownedMemory(ptr, extent, owner, device_id), 0), strides)
