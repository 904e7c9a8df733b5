"""The current device, and the CUDA streams that a program passes; gradsync refuses those that capture a graph."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import cupy

from gradsync.arguments import integer_of
from gradsync.communicators.nccl.library import driver
from gradsync.errors import InvalidArgument

#: CUDA's errors for calls that are forbidden while a graph is captured: the GPU has not failed. Source: cudaError_t.
CAPTURE_ERRORS = range(900, 909)
_CAPTURE_IMPLICIT = 906  # the null stream was queried, and a stream that synchronizes with it captures a graph


class on_device:  # noqa: N801 - it is called as a function
    """Makes a device the current one in a `with` block.

    Afterwards the thread's own device is current again, if this process has a context on it. Else the thread has never
    used it, and choosing it would make a context: half a gigabyte of another rank's GPU.
    """

    __slots__ = ("_device_id", "_own")

    def __init__(self, device_id: int) -> None:
        self._device_id = device_id

    def __enter__(self) -> None:
        self._own: int = cupy.cuda.runtime.getDevice()
        if self._own != self._device_id:
            cupy.cuda.Device(self._device_id).use()

    def __exit__(self, *_: object) -> None:
        if self._own != self._device_id:
            flags, is_active = ctypes.c_uint(), ctypes.c_int()
            driver().cuDevicePrimaryCtxGetState(self._own, ctypes.byref(flags), ctypes.byref(is_active))
            if is_active.value:
                cupy.cuda.Device(self._own).use()


def is_per_thread(stream: Any) -> bool:
    """Whether a CuPy stream is the per-thread default stream: one object, but another stream in each thread."""
    return bool(stream.ptr == cupy.cuda.Stream.ptds.ptr)


def as_stream(stream: Any, device_id: int, who: str) -> Any:
    """Returns a program's stream as CuPy's.

    Args:
        stream: CuPy's or PyTorch's, a handle as an integer, or an object with CUDA's method `__cuda_stream__`; None
            means the calling thread's current stream on the device.
        device_id: the CUDA number of the device whose stream it must be.
        who: the beginning of errors.

    Raises:
        InvalidArgument: it is no stream, or another GPU's.
    """
    if stream is None:
        return cupy.cuda.get_current_stream(device_id)
    if hasattr(stream, "ptr"):
        given = stream.device_id
        if given not in (-1, device_id):  # -1: CuPy does not know the stream's device
            raise InvalidArgument(f"{who} needs a stream of cuda:{device_id}, got one of cuda:{given}")
        return stream
    if not hasattr(stream, "__cuda_stream__"):
        handle = integer_of(getattr(stream, "cuda_stream", stream))
        if handle is None:
            needed = "a CuPy or PyTorch stream, its handle as an integer, or an object with __cuda_stream__"
            given = "an array" if hasattr(stream, "shape") else repr(stream)
            raise InvalidArgument(f"{who} needs a stream: {needed}; got {given}")
        stream = SimpleNamespace(__cuda_stream__=lambda: (0, handle))
    return cupy.cuda.Stream.from_external(stream)


def refuse_capturing(stream: Any, who: str) -> None:
    """Refuses a stream that captures a CUDA graph. Asks the driver once, and does not wait.

    A graph cannot contain a collective's deadline and events, which need the host. CUDA would raise error 905 or 907 in
    the middle of the call, when the other ranks wait for this one.

    Args:
        stream: CuPy's.
        who: the beginning of errors: this rank, and the call.

    Raises:
        InvalidArgument: it captures a graph; or it is the null stream, and one that synchronises with it does.
    """
    try:
        if not stream.is_capturing():
            return
    except RuntimeError as error:  # the capture is invalid
        if getattr(error, "status", _CAPTURE_IMPLICIT) not in CAPTURE_ERRORS:
            return  # the GPU has failed; the launch will raise it
    raise InvalidArgument(_is_capturing(who))


@contextlib.contextmanager
def capture_refusal(who: str) -> Iterator[None]:
    """Turns CUDA's error for a stream that captures a graph into the refusal of one."""
    try:
        yield
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if error.status in CAPTURE_ERRORS:
            raise InvalidArgument(_is_capturing(who)) from error
        raise


def _is_capturing(who: str) -> str:
    return (
        f"{who} cannot be part of a CUDA graph, but the stream captures a graph: end the capture first, or use "
        "another stream"
    )
