"""The lists of workloads, with the shapes of the models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from models import MODELS
from peers.collectives import ALL_REDUCE, BROADCAST, EXTENTS
from peers.contenders import KNOBS, THRESHOLDS
from peers.workload import BUSY, IDLE, Workload

SIZES_BYTES = tuple(2**10 * kibibytes for kibibytes in (4, 64, 256, 1024, 4096, 10240, 40960, 102400))
COLLECTIVE_SIZES_BYTES = tuple(2**10 * kibibytes for kibibytes in (4, 64, 256, 1024, 10240, 102400))
BUSY_SIZE_BYTES = 10 * 2**20
# Small arrays are moved several times a round, as the OSU benchmarks do: the ranks leave a barrier microseconds
# apart, with gloo a hundred of them, and that must not count as their reduction.
MAX_CALLS_A_ROUND = 20
BYTES_A_ROUND = 256 * 2**10
BYTES_A_BLOCK = 256 * 2**20
LIST_ROUNDS = 5
# Of gradsync alone, whose settings differ by a few per cent.
SETTING_ROUNDS = 10
SMALL_GRADIENTS = 10_000
SMALL_ROUNDS = 10
BUSY_ROUNDS = 40
BUSY_LIST_BYTES = 200 * 2**20


def gradient_lists() -> list[Workload]:
    """Returns the gradients of the models; those of the smaller one are timed beside busy processes too."""
    return [
        replace(of_model, states=(IDLE, BUSY)) if of_model.size_bytes <= BUSY_LIST_BYTES else of_model
        for of_model in _of_models()
    ]


def small_gradients() -> list[Workload]:
    """Returns a list of many small gradients, whose time is that of the calls."""
    name = f"{SMALL_GRADIENTS:,} gradients of 100"
    return [Workload(name, ((100,),) * SMALL_GRADIENTS, True, SMALL_ROUNDS, states=(IDLE, BUSY))]


def thresholds() -> list[Workload]:
    """Returns the models' gradients with several thresholds."""
    settings = tuple(THRESHOLDS)
    return [
        replace(of_model, name=f"{of_model.name}, thresholds", settings=settings, rounds=SETTING_ROUNDS)
        for of_model in _of_models()
    ]


def knobs() -> list[Workload]:
    """Returns one model's gradients with each setting."""
    of_model = _of_models()[0]
    return [replace(of_model, name=f"{of_model.name}, knobs", settings=KNOBS, rounds=SETTING_ROUNDS)]


def _of_models() -> list[Workload]:
    """Returns the gradients of the models, last first, as a backward pass hands them over."""
    return [Workload(name, tuple(reversed(shapes())), True, LIST_ROUNDS) for name, shapes in MODELS.items()]


def parameter_lists() -> list[Workload]:
    """Returns the parameters of the models, which rank 0 gives to all at the start of a training."""
    return [
        Workload(f"parameters of {name}", tuple(shapes()), True, LIST_ROUNDS, collective=BROADCAST)
        for name, shapes in MODELS.items()
    ]


def single_arrays() -> list[Workload]:
    """Returns all-reduces of the sizes that the targets name."""
    return [single_array(size_bytes) for size_bytes in SIZES_BYTES]


def sizes_of(collective: str) -> list[Workload]:
    """Returns a collective in the sizes that its targets name."""
    return [single_array(size_bytes, collective) for size_bytes in COLLECTIVE_SIZES_BYTES]


def busy_cores() -> list[Workload]:
    """Returns the all-reduce that is timed beside busy processes as well."""
    beside_busy = replace(single_array(BUSY_SIZE_BYTES), states=(IDLE, BUSY))
    return [replace(beside_busy, name=f"{beside_busy.name}, busy cores", rounds=BUSY_ROUNDS)]


def single_array(size_bytes: int, collective: str = ALL_REDUCE) -> Workload:
    """Returns a collective on an array, with fewer rounds the larger it is."""
    rounds = min(100, max(5, BYTES_A_BLOCK // size_bytes))
    calls = min(MAX_CALLS_A_ROUND, max(1, BYTES_A_ROUND // size_bytes))
    warm_up = max(2, rounds // 5)
    elements = size_bytes // np.dtype(np.float32).itemsize * EXTENTS[collective].source_sizes
    name = size_name(size_bytes, collective)
    return Workload(name, ((elements,),), False, rounds, warm_up, calls, collective=collective)


def size_name(size_bytes: int, collective: str = ALL_REDUCE) -> str:
    """Returns the name of a collective of that size in tables."""
    mebibytes = size_bytes // 2**20
    return f"{collective} {mebibytes} MB" if mebibytes else f"{collective} {size_bytes // 2**10} KB"
