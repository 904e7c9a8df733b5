"""NCCL as CuPy exposes it: loading, versions, errors in our words, and which NCCL type carries which dtype.

Nothing here needs a GPU until a communicator is made. Source: NCCL's API reference, `ncclDataType_t`, `ncclRedOp_t` and
`ncclResult_t`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from gradsync.errors import BackendUnavailable, NcclError
from gradsync.reduction import ReduceOp, dtype_name

RESULT_NAMES = {
    1: "ncclUnhandledCudaError",
    2: "ncclSystemError",
    3: "ncclInternalError",
    4: "ncclInvalidArgument",
    5: "ncclInvalidUsage",
    6: "ncclRemoteError",
    7: "ncclInProgress",
    8: "ncclTimeout",
}
_HINTS = {
    1: "a CUDA call failed: look for an earlier error in this rank's own kernels, or set NCCL_DEBUG=INFO",
    2: "a system call failed: is /dev/shm too small, or a network interface down? NCCL_DEBUG=INFO names the call",
    3: "this is a bug in NCCL, or memory was overwritten; NCCL_DEBUG=INFO shows where",
    4: "an argument was refused; NCCL_DEBUG=WARN names it",
    5: "ranks share a GPU, or differ in what they call; NCCL_DEBUG=WARN names the reason",
    6: "another rank, or the network to it, failed: its own message tells the cause",
    7: "NCCL_COMM_BLOCKING=0 is set: CuPy cannot use communicators that do not block",
    8: "NCCL gave up waiting for another rank",
}

_SPLIT_SINCE = 21801  # NCCL 2.18.1
_OLDEST_CUPY = 14

_INSTALL = "pip install 'cupy-cuda12x[ctk]' nvidia-nccl-cu12 (cuda13x and cu13 where nvidia-smi shows CUDA 13)"


class Wire(NamedTuple):
    """How elements of a dtype travel through NCCL.

    Attributes:
        datatype: NCCL's code.
        per_element: values of that type in one element: 2 for complex numbers.
        widened: dtype that elements are cast to first, where NCCL has none of their size.
    """

    datatype: int
    per_element: int = 1
    widened: np.dtype[Any] | None = None


class NcclLibrary:
    """cupy.cuda.nccl, loaded.

    Raises:
        BackendUnavailable: CuPy or NCCL cannot be loaded, or the environment makes NCCL unusable here.
    """

    def __init__(self) -> None:
        try:
            from cupy.cuda import nccl, nvrtc
        except ImportError as error:
            raise BackendUnavailable(f"CuPy cannot be imported ({error}): {_INSTALL}") from error
        if int(self.cupy_version().partition(".")[0]) < _OLDEST_CUPY:
            raise BackendUnavailable(
                f"CuPy {self.cupy_version()} is too old, gradsync needs {_OLDEST_CUPY} or newer: "
                f"pip install --upgrade 'cupy-cuda12x[ctk]>={_OLDEST_CUPY}' (cuda13x where nvidia-smi shows CUDA 13)"
            )
        if not nccl.available:
            raise BackendUnavailable(
                "CuPy could not load libnccl.so.2: pip install nvidia-nccl-cu12 (or nvidia-nccl-cu13, as for your CuPy)"
            )
        try:
            nvrtc.getVersion()
        except RuntimeError as error:
            raise BackendUnavailable(
                f"CuPy finds no NVRTC to compile its kernels with ({error}): {_INSTALL}"
            ) from error
        if os.environ.get("NCCL_COMM_BLOCKING") == "0":
            raise BackendUnavailable("NCCL_COMM_BLOCKING=0 is set, which CuPy cannot work with: unset it")
        self.binding: Any = nccl
        self.version: int = nccl.get_version()
        self._wires = _wires(nccl)
        self._ops = {
            ReduceOp.SUM: nccl.NCCL_SUM,
            ReduceOp.MEAN: nccl.NCCL_AVG,
            ReduceOp.PROD: nccl.NCCL_PROD,
            ReduceOp.MIN: nccl.NCCL_MIN,
            ReduceOp.MAX: nccl.NCCL_MAX,
        }
        self.bytes_datatype: int = nccl.NCCL_UINT8

    @property
    def can_split(self) -> bool:
        """Whether ncclCommSplit is there, in this NCCL and in that with which CuPy was built."""
        return min(self.version, int(self.binding.get_build_version())) >= _SPLIT_SINCE

    def wire(self, dtype: np.dtype[Any]) -> Wire:
        """Returns how elements of a dtype of the dtype table travel."""
        return self._wires[dtype_name(dtype)]

    def op(self, op: ReduceOp) -> int:
        """Returns NCCL's code of an operator."""
        return int(self._ops[op])

    def make_unique_id(self) -> bytes:
        """Returns a new id of 128 bytes: a capability, never to be shown."""
        with self.errors("ncclGetUniqueId", ""):
            return bytes(self.binding.get_unique_id())

    @contextlib.contextmanager
    def errors(self, call: str, label: str, communicator: Any = None) -> Iterator[None]:
        """Raises what NCCL reports within it as NcclError.

        Args:
            call: the function of NCCL that runs within.
            label: this rank in messages.
            communicator: CuPy's communicator, if there is one: NCCL keeps the last error's text with it.
        """
        try:
            yield
        except self.binding.NcclError as error:
            raise self.error(int(error.status), call, label, communicator) from error
        except KeyError as error:  # CuPy's own NcclError does not know results 7 and 8
            code = error.args[0] if error.args and error.args[0] in (7, 8) else 0
            raise self.error(code, call, label, communicator) from error

    def error(self, code: int, call: str, label: str, communicator: Any = None) -> NcclError:
        """Makes the error for a result of NCCL: what failed where, with what, and what to do."""
        name = RESULT_NAMES.get(code, f"ncclResult {code}")
        last = self._last_error(communicator)
        return NcclError(
            f"{label + ': ' if label else ''}{call} failed with {name} ({code})"
            + (f": {last}" if last else "")
            + f"; {_HINTS.get(code, 'NCCL_DEBUG=INFO tells more')}. NCCL {version_text(self.version)} from "
            f"{library_path()}, CuPy {self.cupy_version()}",
            code=code,
            name=name,
        )

    def _last_error(self, communicator: Any) -> str:
        """Returns ncclGetLastError's text, which CuPy does not expose; empty where there is none."""
        path = library_path()
        if communicator is None or not os.path.exists(path):
            return ""
        try:
            function = ctypes.CDLL(path).ncclGetLastError
        except (OSError, AttributeError):
            return ""
        function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        text = function(communicator.comm)
        return text.decode(errors="replace").strip() if text else ""

    @staticmethod
    def cupy_version() -> str:
        """Returns CuPy's version."""
        import cupy

        return str(cupy.__version__)


def version_text(version: int) -> str:
    """Returns NCCL's version number as people write it: 23203 is 2.32.3."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def library_path() -> str:
    """Returns the file from which this process has loaded NCCL, as the kernel knows it."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            if "libnccl" in line:
                return line.split(maxsplit=5)[-1].strip()
    return "an unknown place"


def _wires(nccl: Any) -> dict[str, Wire]:
    return {
        "float16": Wire(nccl.NCCL_FLOAT16),
        "bfloat16": Wire(nccl.NCCL_BFLOAT16),
        "float32": Wire(nccl.NCCL_FLOAT32),
        "float64": Wire(nccl.NCCL_FLOAT64),
        "complex64": Wire(nccl.NCCL_FLOAT32, per_element=2),
        "complex128": Wire(nccl.NCCL_FLOAT64, per_element=2),
        "int8": Wire(nccl.NCCL_INT8),
        "int16": Wire(nccl.NCCL_INT32, widened=np.dtype(np.int32)),
        "int32": Wire(nccl.NCCL_INT32),
        "int64": Wire(nccl.NCCL_INT64),
        "uint8": Wire(nccl.NCCL_UINT8),
        "uint16": Wire(nccl.NCCL_UINT32, widened=np.dtype(np.uint32)),
        "uint32": Wire(nccl.NCCL_UINT32),
        "uint64": Wire(nccl.NCCL_UINT64),
        "bool": Wire(nccl.NCCL_UINT8),
    }
