"""How fast the device copies its own memory: the limit for packing."""

from __future__ import annotations

from typing import Any

import cupy

from on_gpu.clock import DeviceClock, Operation, take_turns
from on_gpu.rows import Row
from on_gpu.scale import Scale, size_name
from on_gpu.targets import COPY


def measure(scale: Scale, clock: DeviceClock) -> list[Row]:
    """Times cudaMemcpyAsync and a kernel that copies element by element, size by size."""
    return [row for size_bytes in scale.copies_bytes for row in _measure_size(size_bytes, scale, clock)]


def _measure_size(size_bytes: int, scale: Scale, clock: DeviceClock) -> list[Row]:
    source, target = cupy.full(size_bytes // 8, 1.0, cupy.float64), cupy.zeros(size_bytes // 8, cupy.float64)
    operations = {
        "cudaMemcpyAsync": Operation(lambda: copy(source, target)),
        # What CuPy makes of y = x + 0 is bound by memory alone; of y = x it makes cudaMemcpyAsync.
        "elementwise kernel": Operation(lambda: cupy.add(source, 0.0, out=target)),
    }
    samples = take_turns(operations, clock, scale.rounds, scale.warm_up)
    if not bool((target == 1.0).all()):
        raise RuntimeError(f"a copy of {size_bytes} bytes did not arrive")
    return [Row.of(COPY, size_name(size_bytes), name, samples[name], 2 * size_bytes) for name in operations]


def copy(source: Any, target: Any) -> None:
    """Copies as many bytes as the target has, by cudaMemcpyAsync on the current stream."""
    target.data.copy_from_device_async(source.data, target.nbytes)
