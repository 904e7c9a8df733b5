"""A workload: a collective on one array or on a model's whole list of arrays, with inputs whose result is
known. The ranks of every system import this, and not all of their environments have gradsync.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from peers.collectives import ALL_REDUCE, BROADCAST, ELEMENTWISE, EXTENTS, RANKS, result_of
from peers.contenders import GRADSYNC, OF_A_LIST, OF_AN_ARRAY, OF_PARAMETERS

Shape = tuple[int, ...]

IDLE = "idle"
BUSY = "busy"
# A prime: the pattern repeats at another place of every cache line, so that misplaced data shows.
_PATTERN_ELEMENTS = 1009


@dataclass(frozen=True)
class Workload:
    """One workload of all contenders, in float32.

    Attributes:
        name: in tables.
        shapes: of the arrays that a rank gives, in the order in which a program has them.
        is_list: whether they are a model's, and synchronised as such: ALL_REDUCE then is the mean of its gradients,
            BROADCAST the start of its parameters. Otherwise it is one array.
        warm_up: how many rounds of a block are thrown away first.
        rounds: how many timings a block gives.
        calls: how many times a round repeats it.
        states: of the cores, IDLE or BUSY.
        collective: a key of EXTENTS.
        settings: of gradsync's callback, by name (THRESHOLDS, KNOBS, ...): where there are any, they are timed beside
            the default ones, and no other system takes part.
    """

    name: str
    shapes: tuple[Shape, ...]
    is_list: bool
    rounds: int
    warm_up: int = 2
    calls: int = 1
    states: tuple[str, ...] = (IDLE,)
    collective: str = ALL_REDUCE
    settings: tuple[str, ...] = ()

    @property
    def contenders(self) -> Mapping[str, str]:
        """Name -> system."""
        if self.settings:
            return dict.fromkeys((GRADSYNC, *self.settings), GRADSYNC)
        if not self.is_list:
            return OF_AN_ARRAY
        return OF_PARAMETERS if self.collective == BROADCAST else OF_A_LIST

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays that a rank gives."""
        return sum(map(prod, self.shapes)) * np.dtype(np.float32).itemsize

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
            for part, values in _periods(array.reshape(-1, copy=False), _period(index, array.size, rank)):
                np.copyto(part, values)

    def wrong(self, results: Iterable[np.ndarray], rank: int, rounding: float = 0.0) -> int | None:
        """Returns the index of the first wrong array of a rank; None if all are right.

        Args:
            results: in the order of the arrays.
            rank: whose.
            rounding: how far an element may be off, as a part of it.
        """
        for index, (result, shape) in enumerate(zip(results, self.shapes, strict=True)):
            if not self._is_right(index, shape, result, rank, rounding):
                return index
        return None

    def _is_right(self, index: int, shape: Shape, result: np.ndarray, rank: int, rounding: float) -> bool:
        elements = prod(shape)
        periods = [_period(index, elements, other) for other in range(RANKS)]
        if self.collective not in ELEMENTWISE:
            inputs = [np.resize(period, elements) for period in periods]
            return np.array_equal(result, result_of(self.collective, inputs, rank))
        expected = result_of(self.collective, periods, rank)
        if self.collective == ALL_REDUCE and self.is_list:
            expected = expected / np.float32(RANKS)
        return result.shape == shape and all(
            np.allclose(part, values, rtol=rounding, atol=0) if rounding else bool((part == values).all())
            for part, values in _periods(result.reshape(-1), expected)
        )

    def quick(self) -> Workload:
        """Returns the same with few rounds."""
        return replace(self, rounds=2, warm_up=1)


def _period(index: int, elements: int, rank: int) -> np.ndarray:
    """Returns the pattern of an input: small integers, exact in sums and means, that differ by array and rank."""
    period = np.arange(index, index + min(_PATTERN_ELEMENTS, elements), dtype=np.float32) % 251
    return period * np.float32(rank + 1)


def _periods(flat: np.ndarray, period: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Returns views that together are a 1-D array, each with what it holds where the array repeats the period."""
    if flat.size:
        whole = flat.size - flat.size % period.size
        yield flat[:whole].reshape(-1, period.size), period
        yield flat[whole:], period[: flat.size - whole]
