"""The calls of the CUDA runtime that gradsync and its tests make."""

from __future__ import annotations

from typing import Any

from . import stream as _stream
from ._devices import all_devices, current_device, device_state
from ._errors import INVALID_RESOURCE_HANDLE, CUDARuntimeError

__all__ = ["CUDARuntimeError"]

streamCaptureModeGlobal = 0  # noqa: N816


def getDeviceCount() -> int:  # noqa: N802
    return len(all_devices())


def getDevice() -> int:  # noqa: N802
    return current_device().device_id


def deviceGetPCIBusId(device: int) -> str:  # noqa: N802
    return device_state(device).pci_bus_id


def getDeviceProperties(device: int) -> dict[str, Any]:  # noqa: N802
    uuid = device_state(device).uuid
    return {"name": b"Fake", "uuid": uuid, "totalGlobalMem": 16 * 1024**3, "major": 9, "minor": 0}


def runtimeGetVersion() -> int:  # noqa: N802
    return 12090


def driverGetVersion() -> int:  # noqa: N802
    return 12090


def eventQuery(event: int) -> int:  # noqa: N802
    found = _stream.events.get(event)
    return INVALID_RESOURCE_HANDLE if found is None else found.query()


def streamSynchronize(stream: int) -> None:  # noqa: N802
    current_device().queue(stream).synchronize()
