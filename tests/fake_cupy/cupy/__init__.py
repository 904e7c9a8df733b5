"""A stand-in for CuPy 14 over host memory: enough of it to run and to check the NCCL communicator without a GPU.

Streams are threads, and arrays are views of blocks of ordinary memory. Mistakes that a GPU would not report show: work
that does not wait for its data reads stale values, new memory holds NaNs, memory returns to the pool while it is still
in use and is filled with NaNs for its next user, and host and device memory do not mix. See cupy.cuda.nccl for the
collectives.

The environment: FAKE_CUPY_DEVICES (number of devices, 1), FAKE_CUPY_DELAY_MS and
FAKE_CUPY_SEED (random pauses before each piece of work), FAKE_CUPY_VERSION,
FAKE_CUPY_NCCL_VERSION, FAKE_CUPY_TIMEOUT (seconds until a missing peer is an error, 20),
FAKE_CUPY_HANG (1: never). As in CuPy, CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1 gives each thread a default stream
of its own.
"""

from os import environ as _environ
from types import ModuleType

import numpy as _np

from . import cuda, linalg
from ._creation import (
    arange,
    array,
    asarray,
    ascontiguousarray,
    asfortranarray,
    asnumpy,
    empty,
    empty_like,
    full,
    full_like,
    ones,
    ones_like,
    zeros,
    zeros_like,
)
from ._dlpack import from_dlpack
from ._math import (
    Ufunc,
    amax,
    amin,
    broadcast_to,
    concatenate,
    copyto,
    matmul,
    may_share_memory,
    prod,
    shares_memory,
    sum,
    where,
)
from ._ndarray import ndarray
from ._raw import RawModule
from .cuda.memory import default_pool as _default_pool

__version__ = _environ.get("FAKE_CUPY_VERSION", "14.2.0")
__all__ = [
    "RawModule",
    "amax",
    "amin",
    "arange",
    "array",
    "asarray",
    "ascontiguousarray",
    "asfortranarray",
    "asnumpy",
    "broadcast_to",
    "concatenate",
    "copyto",
    "cuda",
    "empty",
    "empty_like",
    "from_dlpack",
    "full",
    "full_like",
    "get_array_module",
    "get_default_memory_pool",
    "linalg",
    "matmul",
    "may_share_memory",
    "ndarray",
    "ones",
    "ones_like",
    "prod",
    "shares_memory",
    "sum",
    "where",
    "zeros",
    "zeros_like",
]

bool_ = _np.bool_
int8, int16, int32, int64 = _np.int8, _np.int16, _np.int32, _np.int64
uint8, uint16, uint32, uint64 = _np.uint8, _np.uint16, _np.uint32, _np.uint64
float16, float32, float64 = _np.float16, _np.float32, _np.float64
complex64, complex128 = _np.complex64, _np.complex128
dtype, newaxis, nan, inf = _np.dtype, None, _np.nan, _np.inf

add, subtract, multiply, divide = (Ufunc(f) for f in (_np.add, _np.subtract, _np.multiply, _np.true_divide))
true_divide, sqrt, absolute, isfinite, isnan = (
    Ufunc(f) for f in (_np.true_divide, _np.sqrt, _np.absolute, _np.isfinite, _np.isnan)
)
minimum, maximum, equal, rint = (Ufunc(f) for f in (_np.minimum, _np.maximum, _np.equal, _np.rint))


def get_array_module(*args: object) -> ModuleType:
    """Returns this module where any argument is a device array, else NumPy."""
    import cupy

    return cupy if any(isinstance(argument, ndarray) for argument in args) else _np


def get_default_memory_pool() -> cuda.MemoryPool:
    """Returns the pool."""
    return _default_pool
