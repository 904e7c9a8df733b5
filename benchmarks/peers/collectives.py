"""The collectives that are timed on one array: their results, and the meaning of their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RANKS = 2
ROOT = 0

ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
BROADCAST = "broadcast"
ALL_TO_ALL = "all_to_all"


#: Each element of a result depends on the elements at its own place.
ELEMENTWISE = (ALL_REDUCE, BROADCAST)


@dataclass(frozen=True)
class Extent:
    """How large a collective of a given size is.

    Attributes:
        size_means: which bytes of a rank are counted.
        source_sizes: how many times the size a rank gives.
        target_sizes: how many times the size a rank gets into an array of its own; 0 where it works in place.
    """

    size_means: str
    source_sizes: int = 1
    target_sizes: int = 0


EXTENTS = {
    ALL_REDUCE: Extent("the array"),
    ALL_GATHER: Extent("what a rank gives; it gets as much of each rank", target_sizes=RANKS),
    REDUCE_SCATTER: Extent("what a rank gets; it gives as much to each rank", source_sizes=RANKS, target_sizes=1),
    BROADCAST: Extent("the array"),
    ALL_TO_ALL: Extent("all that a rank gives, its own part too; it gets as much", target_sizes=1),
}


def result_of(collective: str, inputs: Sequence[np.ndarray], rank: int) -> np.ndarray:
    """Returns the expected result of a rank.

    Args:
        collective: a key of EXTENTS.
        inputs: by rank.
        rank: of the result.
    """
    if collective == ALL_REDUCE:
        return np.sum(inputs, axis=0)
    if collective == ALL_GATHER:
        return np.concatenate(inputs)
    if collective == REDUCE_SCATTER:
        return np.split(np.sum(inputs, axis=0), RANKS)[rank]
    if collective == BROADCAST:
        return inputs[ROOT]
    return np.concatenate([np.split(source, RANKS)[rank] for source in inputs])
