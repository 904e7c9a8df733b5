"""What the ranks look at together once gradients are reduced: each at its share, for all have the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradsync.bucketing.flat_buffer import array_module
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.pieces import share_of
from gradsync.reduction import Array


def own_share(flats: Sequence[Array], communicator: Communicator) -> list[Array]:
    """Returns this rank's share of some flat arrays: views, of a world_size-th of their elements together."""
    if not flats:
        return []
    sizes = tuple([flat.size for flat in flats])
    share = share_of(sizes, flats[0].dtype.itemsize, communicator.rank, communicator.world_size)
    return [flats[piece.array][piece.begin : piece.end] for piece in share]


def on_host(results: Sequence[Any]) -> list[Any]:
    """Returns Python numbers; 0-d arrays on a GPU are copied together, and the host waits once for all of them."""
    if not results or isinstance(results[0], (bool, float)):
        return list(results)
    with results[0].device:
        numbers: list[Any] = array_module(results[0]).concatenate([result.reshape(1) for result in results]).tolist()
    return numbers
