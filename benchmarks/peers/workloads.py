"""What is timed: a collective on one array or on a model's whole list of arrays, with inputs whose result is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from models import MODELS, Shape
from peers.collectives import ALL_REDUCE, BROADCAST, EXTENTS, RANKS, result_of
from peers.contenders import OF_A_LIST, OF_AN_ARRAY, OF_PARAMETERS

IDLE = "idle"
BUSY = "busy"
SIZES_BYTES = tuple(2**10 * kibibytes for kibibytes in (4, 64, 256, 1024, 4096, 10240, 40960, 102400))
COLLECTIVE_SIZES_BYTES = tuple(2**10 * kibibytes for kibibytes in (4, 64, 256, 1024, 10240, 102400))
BUSY_SIZE_BYTES = 10 * 2**20
# Small arrays are moved several times a round, as the OSU benchmarks do: the ranks leave a barrier microseconds
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
        shapes: of the arrays that a rank gives, in the order in which a program has them.
        is_list: whether they are a model's, and synchronised as such: ALL_REDUCE then is the mean of its gradients,
            BROADCAST the start of its parameters. Otherwise it is one array.
        warm_up: how many rounds of a block are thrown away first.
        rounds: how many timings a block gives.
        calls: how many times a round repeats it.
        states: of the cores, IDLE or BUSY.
        collective: a key of EXTENTS.
    """

    name: str
    shapes: tuple[Shape, ...]
    is_list: bool
    rounds: int
    warm_up: int = 2
    calls: int = 1
    states: tuple[str, ...] = (IDLE,)
    collective: str = ALL_REDUCE

    @property
    def contenders(self) -> Mapping[str, str]:
        """Name -> system."""
        if not self.is_list:
            return OF_AN_ARRAY
        return OF_PARAMETERS if self.collective == BROADCAST else OF_A_LIST

    @property
    def adds_up(self) -> bool:
        """Whether repeating it changes the inputs: a sum in place. A mean stays what it is, however often taken."""
        return self.collective == ALL_REDUCE and not self.is_list

    def make_arrays(self) -> list[np.ndarray]:
        """Returns the arrays that a rank gives; they are not filled yet."""
        return [np.empty(shape, np.float32) for shape in self.shapes]

    def make_target(self, source: np.ndarray) -> np.ndarray:
        """Returns where the result goes, every page touched; `source` itself where the collective works in place."""
        extent = EXTENTS[self.collective]
        if extent.target_sizes == 0:
            return source
        return np.full(source.size // extent.source_sizes * extent.target_sizes, -1, np.float32)

    def fill(self, arrays: list[np.ndarray], rank: int) -> None:
        """Fills the arrays with this rank's inputs."""
        for index, array in enumerate(arrays):
            np.copyto(array, _input(index, array.shape, rank))

    def wrong(self, results: Iterable[np.ndarray], rank: int) -> int | None:
        """Returns the index of the first array that is not what this rank has to get; None when all are."""
        for index, (result, shape) in enumerate(zip(results, self.shapes, strict=True)):
            inputs = [_input(index, shape, other) for other in range(RANKS)]
            expected = result_of(self.collective, inputs, rank)
            if self.collective == ALL_REDUCE and self.is_list:
                expected = expected / np.float32(RANKS)
            if not np.array_equal(result, expected):
                return index
        return None

    def quick(self) -> Workload:
        """Returns the same with few rounds."""
        return replace(self, rounds=2, warm_up=1)


def _input(index: int, shape: Shape, rank: int) -> np.ndarray:
    """Returns small integers, which sums and means keep exact; other ones for each array and rank."""
    period = np.arange(index, index + _PATTERN_ELEMENTS, dtype=np.float32) % 251
    return np.resize(period * np.float32(rank + 1), prod(shape)).reshape(shape)


def gradient_lists() -> list[Workload]:
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
    """Returns how tables call a collective of that size."""
    mebibytes = size_bytes // 2**20
    return f"{collective} {mebibytes} MB" if mebibytes else f"{collective} {size_bytes // 2**10} KB"
