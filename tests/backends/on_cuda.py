"""What tests over NCCL share: arrays, streams, and ways for ranks to wait for each other that no GPU has a part in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from commands import wait_until

SIZE = 5000
HANGS = {"FAKE_CUPY_HANG": "1"}  # as on a GPU: what misses a rank neither ends nor says anything


def full(value: float, size: int = SIZE) -> Any:
    import cupy

    return cupy.full(size, value, np.float32)


def total(comm: Any, value: float) -> float:
    """The sum over the ranks of rank + value."""
    return comm.world_size * value + sum(range(comm.world_size))


def assert_all(array: Any, wanted: float, stream: Any = None) -> None:
    got = array.get(stream=stream) if hasattr(array, "get") else array
    assert (got == wanted).all(), f"{got[:3]} where {wanted} was wanted"


def side_stream() -> Any:
    """A stream that waits for nothing but the present work of the current one."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    stream.wait_event(cupy.cuda.get_current_stream().record())
    return stream


def tell(folder: Path, what: str) -> None:
    """For `hear` on another rank."""
    (folder / what).touch()


def hear(folder: Path, what: str) -> None:
    """Waits until another rank has told it."""
    wait_until((folder / what).exists, what)


def meet(folder: Path, comm: Any, where: str) -> None:
    """Waits until all ranks have come here."""
    tell(folder, f"{where} {comm.rank}")
    for rank in range(comm.world_size):
        hear(folder, f"{where} {rank}")
