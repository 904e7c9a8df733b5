"""What is timed: the mean of a model's gradients, or the sum of one array, with inputs whose result is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from models import MODELS, Shape
from peers.contenders import OF_A_LIST, OF_AN_ARRAY

RANKS = 2
IDLE = "idle"
BUSY = "busy"
SIZES_BYTES = tuple(2**10 * kibibytes for kibibytes in (4, 64, 256, 1024, 4096, 10240, 40960, 102400))
BUSY_SIZE_BYTES = 10 * 2**20
# Small arrays are reduced several times a round, as the OSU benchmarks do: the ranks leave a barrier microseconds
# apart, with gloo a hundred of them, and that must not count as their reduction.
MAX_CALLS_A_ROUND = 20
BYTES_A_ROUND = 256 * 2**10
BYTES_A_BLOCK = 256 * 2**20
LIST_ROUNDS = 5
BUSY_ROUNDS = 40
# A prime: the pattern comes back at another place of every cache line, so that misplaced data shows.
_PATTERN_ELEMENTS = 1009


@dataclass(frozen=True)
class Workload:
    """One thing that all contenders do, float32 throughout.

    Attributes:
        name: how tables call it.
        shapes: of the arrays, in the order of the model's parameters.
        is_list: whether it is the mean of a list of gradients; otherwise it is the sum of one array.
        warm_up: how many rounds of a block are thrown away first.
        rounds: how many timings a block gives.
        calls: how many times a round repeats it.
        states: of the cores, IDLE or BUSY.
    """

    name: str
    shapes: tuple[Shape, ...]
    is_list: bool
    rounds: int
    warm_up: int = 2
    calls: int = 1
    states: tuple[str, ...] = (IDLE,)

    @property
    def contenders(self) -> Mapping[str, str]:
        """Name -> system."""
        return OF_A_LIST if self.is_list else OF_AN_ARRAY

    def make_arrays(self) -> list[np.ndarray]:
        """Returns the arrays, last first, as a backward pass hands them over; they are not filled yet."""
        return [np.empty(shape, np.float32) for shape in reversed(self.shapes)]

    def fill(self, arrays: list[np.ndarray], rank: int) -> None:
        """Fills the arrays with this rank's inputs."""
        for index, array in enumerate(arrays):
            np.multiply(_pattern(index, array), rank + 1, out=array)

    def wrong(self, arrays: list[np.ndarray]) -> int | None:
        """Returns the index of the first array that is not the reduced input of all ranks; None when all are."""
        total = sum(range(1, RANKS + 1))
        factor = np.float32(total / RANKS if self.is_list else total)
        for index, array in enumerate(arrays):
            if not np.array_equal(array, _pattern(index, array) * factor):
                return index
        return None

    def quick(self) -> Workload:
        """Returns the same with few rounds."""
        return replace(self, rounds=2, warm_up=1)


def _pattern(index: int, array: np.ndarray) -> np.ndarray:
    """Returns small integers in the array's shape, which sums and means keep exact; other ones for each array."""
    period = np.arange(index, index + _PATTERN_ELEMENTS, dtype=np.float32) % 251
    return np.resize(period, array.size).reshape(array.shape)


def gradient_lists() -> list[Workload]:
    """Returns the gradients of the models."""
    return [Workload(name, tuple(shapes()), True, LIST_ROUNDS) for name, shapes in MODELS.items()]


def single_arrays() -> list[Workload]:
    """Returns all-reduces of the sizes that the targets name."""
    return [single_array(size_bytes) for size_bytes in SIZES_BYTES]


def busy_cores() -> list[Workload]:
    """Returns the all-reduce that is timed beside busy processes as well."""
    beside_busy = replace(single_array(BUSY_SIZE_BYTES), states=(IDLE, BUSY))
    return [replace(beside_busy, name=f"{beside_busy.name}, busy cores", rounds=BUSY_ROUNDS)]


def single_array(size_bytes: int) -> Workload:
    """Returns the all-reduce of an array of that size, with fewer rounds the larger it is."""
    rounds = min(100, max(5, BYTES_A_BLOCK // size_bytes))
    calls = min(MAX_CALLS_A_ROUND, max(1, BYTES_A_ROUND // size_bytes))
    warm_up = max(2, rounds // 5)
    return Workload(size_name(size_bytes), (_shape(size_bytes),), False, rounds, warm_up, calls)


def size_name(size_bytes: int) -> str:
    """Returns how tables call the all-reduce of an array of that size."""
    mebibytes = size_bytes // 2**20
    return f"all_reduce {mebibytes} MB" if mebibytes else f"all_reduce {size_bytes // 2**10} KB"


def _shape(size_bytes: int) -> Shape:
    return (size_bytes // np.dtype(np.float32).itemsize,)
