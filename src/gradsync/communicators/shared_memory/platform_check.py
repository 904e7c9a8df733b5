"""Where shared memory between ranks works."""

from __future__ import annotations

import platform
import sys

from gradsync.errors import BackendUnavailable


def check_platform() -> None:
    """Refuses where the barrier's memory ordering does not hold.

    Raises:
        BackendUnavailable: not Linux on x86-64.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "AMD64"):
        raise BackendUnavailable(f"shared memory runs on Linux x86-64 only, this is {sys.platform} on {machine}")
