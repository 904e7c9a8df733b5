"""The device as CuPy shows it."""

from __future__ import annotations

import threading

from ._devices import choose_device, current_device_id, device_state

_entered = threading.local()


class Device:
    """A device by its number, by default the current one; a context that makes it current."""

    def __init__(self, device: int | Device | None = None) -> None:
        self.id: int = current_device_id() if device is None else int(device)

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    __hash__ = None  # as in CuPy

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def __enter__(self) -> Device:
        left = current_device_id()
        self.use()
        if not hasattr(_entered, "left"):
            _entered.left = []
        _entered.left.append(left)
        return self

    def __exit__(self, *exc_info: object) -> None:
        choose_device(_entered.left.pop())

    def use(self) -> None:
        """Makes it this thread's device."""
        choose_device(self.id)

    def synchronize(self) -> None:
        """Waits for all its streams."""
        device_state(self.id).synchronize()

    @property
    def pci_bus_id(self) -> str:
        return device_state(self.id).pci_bus_id
