"""The calls of the CUDA runtime that CuPy exposes, as far as anybody needs them here."""

from __future__ import annotations

from typing import Any

from . import stream as _stream
from ._devices import PER_THREAD, all_devices, current_device, current_device_id, device_state
from ._errors import INVALID_RESOURCE_HANDLE, CUDARuntimeError

__all__ = ["CUDARuntimeError"]

streamLegacy, streamPerThread = 1, PER_THREAD  # noqa: N816
streamCaptureModeGlobal, streamCaptureModeThreadLocal, streamCaptureModeRelaxed = range(3)  # noqa: N816
_MEMORY_BYTES = 16 * 1024**3


def getDeviceCount() -> int:  # noqa: N802
    return len(all_devices())


def getDevice() -> int:  # noqa: N802
    return current_device_id()


def deviceSynchronize() -> None:  # noqa: N802
    current_device().synchronize()


def deviceGetPCIBusId(device: int) -> str:  # noqa: N802
    return device_state(device).pci_bus_id


def deviceCanAccessPeer(device: int, peerDevice: int) -> int:  # noqa: N802, N803
    """No device reads another's memory by itself."""
    device_state(device), device_state(peerDevice)
    return 0


def getDeviceProperties(device: int) -> dict[str, Any]:  # noqa: N802
    return {
        "name": b"Stand-in",
        "uuid": device_state(device).uuid,
        "totalGlobalMem": _MEMORY_BYTES,
        "major": 9,
        "minor": 0,
        "multiProcessorCount": 132,
    }


def runtimeGetVersion() -> int:  # noqa: N802
    return 12090


def driverGetVersion() -> int:  # noqa: N802
    return 12090


def eventQuery(event: int) -> int:  # noqa: N802
    found = _stream.events.get(event)
    return INVALID_RESOURCE_HANDLE if found is None else found._query()


def streamSynchronize(stream: int) -> None:  # noqa: N802
    current_device().queue(stream).synchronize()
