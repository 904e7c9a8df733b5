"""The functions of the CUDA driver that gradsync calls by ctypes: who opens libcuda.so.1 gets these."""

from __future__ import annotations

import ctypes
from typing import Any

from . import runtime
from ._devices import contexts


class _Driver:
    """libcuda.so.1."""

    @staticmethod
    def cuEventQuery(event: ctypes.c_void_p) -> int:  # noqa: N802
        return runtime.eventQuery(event.value)

    @staticmethod
    def cuDevicePrimaryCtxGetState(device: int, flags: Any, active: Any) -> int:  # noqa: N802
        flags._obj.value, active._obj.value = 0, device in contexts
        return 0


_open = ctypes.CDLL


def _open_library(name: Any, *arguments: Any, **options: Any) -> Any:
    return _Driver() if name == "libcuda.so.1" else _open(name, *arguments, **options)


ctypes.CDLL = _open_library  # type: ignore[misc,assignment]
