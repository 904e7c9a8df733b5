"""Predicts the time of an all-reduce from the latency and the bandwidth of the links.

predict_threshold.py uses it. All times are in seconds, sizes in bytes. A message of
n bytes over a link takes `latency_seconds + n * seconds_per_byte` (the alpha-beta model); the arithmetic of the
reduction counts as part of the bytes.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009), for
the ring and the least bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gradsync.errors import InvalidArgument

_ROUNDING = 1e-9  # what is left of equal parts after rounding counts as nothing


@dataclass(frozen=True)
class Link:
    """What carries messages.

    Attributes:
        latency_seconds: the time of a message without bytes.
        seconds_per_byte: the inverse of the bandwidth.
    """

    latency_seconds: float
    seconds_per_byte: float

    def seconds(self, size_bytes: float) -> float:
        """Returns the time of one message."""
        return self.latency_seconds + size_bytes * self.seconds_per_byte


def ring_seconds(ranks: int, size_bytes: float, link: Link) -> float:
    """Returns the time of a ring: 2(p - 1) steps, each with a p-th of the bytes.

    No algorithm moves fewer bytes per rank: Patarasuk and Yuan.
    """
    _check(ranks, size_bytes)
    steps = 2 * (ranks - 1)
    return steps * link.latency_seconds + steps / ranks * size_bytes * link.seconds_per_byte


def exposed_seconds(
    total_bytes: float, threshold_bytes: float, backward_seconds: float, seconds_of: Callable[[float], float]
) -> float:
    """Returns how long after the backward pass the last bucket is done.

    Gradients come evenly over the backward pass; buckets are reduced one after the other, each once it is full.

    Args:
        total_bytes: of all gradients.
        threshold_bytes: of a bucket; the last one may be smaller.
        backward_seconds: how long the backward pass takes.
        seconds_of: the time of an all-reduce of so many bytes.

    Raises:
        InvalidArgument: the threshold is not above 0, or above all bytes.
    """
    if not 0 < threshold_bytes <= total_bytes:
        raise InvalidArgument(f"a threshold needs to be above 0 and at most {total_bytes} bytes, got {threshold_bytes}")
    whole = math.floor(total_bytes / threshold_bytes)
    rest_bytes = total_bytes - whole * threshold_bytes
    each, filled_every = seconds_of(threshold_bytes), backward_seconds * threshold_bytes / total_bytes
    # Of equal buckets at equal intervals either none waits for the one before, or each waits for all of them.
    done = max(whole * filled_every + each, filled_every + whole * each)
    if rest_bytes > _ROUNDING * total_bytes:
        done = max(done, backward_seconds) + seconds_of(rest_bytes)
    return max(done - backward_seconds, 0.0)  # what is done at the pass's very end may round to before it


def best_threshold_bytes(
    total_bytes: float,
    backward_seconds: float,
    seconds_of: Callable[[float], float],
) -> float:
    """Returns the threshold with the least exposed time; the smallest of those within 1 % of it.

    Equal parts of the whole are tried, from 1 to 4,096. Args as `exposed_seconds`.
    """
    parts = (total_bytes / count for count in range(4096, 0, -1))
    found = [(size, exposed_seconds(total_bytes, size, backward_seconds, seconds_of)) for size in parts]
    least = min(seconds for _, seconds in found)
    return min(size for size, seconds in found if seconds <= 1.01 * least)


def _check(ranks: int, size_bytes: float) -> None:
    if ranks < 1 or size_bytes < 0:
        raise InvalidArgument(f"a cost needs at least one rank and no negative size, got {ranks}, {size_bytes}")
