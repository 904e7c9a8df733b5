"""What hundreds of equal steps of an AllreduceCallback cost in memory; run inside rank processes."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from typing import Any

import numpy as np

import gradsync as gs
from belongings import Belongings

WARM_UP_STEPS = 200
LARGEST_GROWTH_BYTES = 2 * 2**20
LARGEST_TRACED_GROWTH_BYTES = 16 * 1024
LARGEST_PEAK_BYTES = 64 * 1024
SHAPES = {"weight": ((64, 65), "float32"), "bias": ((65,), "float32"), "double": ((50,), "float64")}
LARGE = {"weight": ((700, 600), "float32"), "bias": ((600,), "float32"), "double": ((90_000,), "float64")}

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"parameters": SHAPES, "gradient_as_bucket_view": True},
    "parameters": {"parameters": SHAPES},
    "watched": {"nonfinite": "raise", "clip_norm": float("inf")},
}


def make(comm: Any, mode: str, shapes: Any) -> tuple[Any, dict[str, Any]]:
    options = dict(MODES[mode])
    if "parameters" in options:
        options["parameters"] = shapes
    callback = gs.AllreduceCallback("mean", comm, threshold_bytes=10**5, **options)
    if mode == "views":
        return callback, callback.gradient_buffers()
    return callback, {name: np.ones(shape, dtype) for name, (shape, dtype) in shapes.items()}


def run(callback: Any, arrays: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        for name, array in arrays.items():
            callback(name, array)
        callback.flush()


def stay_as_large_as_they_are(comm: Any, mode: str, steps: int) -> list[str]:
    """Returns in words what has grown in so many steps: the process, or what Python has allocated."""
    callback, arrays = make(comm, mode, SHAPES)
    run(callback, arrays, WARM_UP_STEPS)
    gc.collect()
    resident = Belongings.now().resident_bytes
    run(callback, arrays, steps)
    gc.collect()
    grown = Belongings.now().resident_bytes - resident
    found = [f"{mode}: {grown} bytes resident"] if grown > LARGEST_GROWTH_BYTES else []
    tracemalloc.start()
    run(callback, arrays, 20)
    gc.collect()
    growths = []
    for _ in range(3):  # the least of them: a thread that reads from the server has room for a message in its hands
        before, _ = tracemalloc.get_traced_memory()
        run(callback, arrays, 100)
        gc.collect()
        growths.append(tracemalloc.get_traced_memory()[0] - before)
    tracemalloc.stop()
    traced = min(growths)
    assert callback.statistics.steps == WARM_UP_STEPS + steps + 320
    return found + ([f"{mode}: {traced} bytes traced"] if traced > LARGEST_TRACED_GROWTH_BYTES else [])


def allocate_nothing_large(comm: Any, mode: str) -> int:
    """Returns the most bytes that a steady step of 2 MB has allocated at once; NumPy tells what it allocates, too.

    The least of some steps: a rank that waits for long looks for news of the others, with room for those.
    """
    callback, arrays = make(comm, mode, LARGE)
    run(callback, arrays, 4)
    gc.collect()
    tracemalloc.start()
    run(callback, arrays, 1)  # tracing itself makes something the first time
    peaks = []
    for _ in range(8):
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        run(callback, arrays, 1)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    return min(peaks)


def measure(comm: Any, modes: tuple[str, ...], steps: int) -> list[str]:
    found = []
    for mode in modes:
        found += stay_as_large_as_they_are(comm, mode, steps)
        peak = allocate_nothing_large(comm, mode)
        found += [f"{mode}: {peak} bytes in a step"] if peak > LARGEST_PEAK_BYTES else []
    return found


def keep_dropped_gradients(comm: Any) -> list[str]:
    """Returns the modes in which a gradient still exists although the program has dropped it; no garbage is collected.

    In every second step the arrays are those of the step before.
    """
    found = []
    gc.collect()
    gc.disable()
    try:
        for name, options in (MODES | {"clipped": {"clip_norm": 1.0}}).items():
            for size in (100, 200_000):
                shapes = {"weight": ((size,), "float32"), "bias": ((3,), "float32")}
                named = {"parameters": shapes} if "parameters" in options else {}
                callback = gs.AllreduceCallback("mean", comm, **(options | named))
                for _ in range(3):
                    arrays = {each: np.ones(*of) for each, of in shapes.items()}
                    run(callback, arrays, 2)
                    dropped = [weakref.ref(array) for array in arrays.values()]
                    del arrays
                    run(callback, {each: np.ones(*of) for each, of in shapes.items()}, 1)
                    found += [f"{name} {size}" for reference in dropped if reference() is not None]
    finally:
        gc.enable()
    return found
