"""Whether this process has touched CUDA, asked of the driver without touching it.

Ranks that are forked from a process with CUDA cannot use CUDA: the driver, once initialised, refuses every call in a
forked child. Ranks that start afresh can, but what this process holds on a GPU is missing there.
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

from gradsync.errors import InvalidArgument

_CUDA_SUCCESS = 0


def check_cuda_untouched(who: str, start_method: str) -> None:
    """Looks at this process before it starts ranks; a warning comes once.

    Args:
        who: what starts them, for the message.
        start_method: "fork", "spawn" or "forkserver".

    Raises:
        InvalidArgument: the ranks are to be forked, and CUDA is initialised.
    """
    devices = devices_in_use()
    if devices is None:
        return
    if start_method == "fork":
        raise InvalidArgument(
            f"{who} cannot fork ranks: CUDA is initialised in this process ({_describe(devices)}), and forked ranks "
            "could not use it; keep CUDA out of the parent before forking, or use start method 'spawn'"
        )
    if devices:
        _warn_once(
            f"{who}: this process itself uses CUDA ({_describe(devices)}) and holds memory there that its ranks then "
            "lack; keep CUDA out of the process that starts ranks"
        )


def devices_in_use(driver: Any = None) -> list[int] | None:
    """Returns the devices on which this process has a primary context, the one of CuPy, PyTorch and the CUDA runtime.

    Args:
        driver: libcuda as ctypes gives it; by default the one that this process has loaded.

    Returns:
        The devices as this process numbers them; none yet where a library has only looked for devices. None: CUDA
        is not initialised, so that a fork does it no harm.

    Source: CUDA Driver API: before cuInit every function returns CUDA_ERROR_NOT_INITIALIZED (cuInit);
    cuDevicePrimaryCtxGetState creates no context.
    """
    driver = driver or _loaded_driver()
    if driver is None:
        return None
    import ctypes

    count = ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) != _CUDA_SUCCESS:
        return None
    return [ordinal for ordinal in range(count.value) if _has_context(driver, ordinal)]


def _loaded_driver() -> Any:
    """Returns libcuda if something in this process has loaded it already."""
    import ctypes

    try:
        return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except (OSError, AttributeError):  # not loaded, or not Linux
        return None


def _has_context(driver: Any, ordinal: int) -> bool:
    import ctypes

    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    if driver.cuDeviceGet(ctypes.byref(device), ordinal) != _CUDA_SUCCESS:
        return False
    code = driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    return bool(code == _CUDA_SUCCESS and active.value)


def _describe(devices: list[int]) -> str:
    if not devices:
        return "the driver"
    return f"device{'s' if len(devices) > 1 else ''} {', '.join(map(str, devices))}"


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=4)
