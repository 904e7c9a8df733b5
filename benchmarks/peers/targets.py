"""The promises beside the peers, as limits for gradsync's median."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from models import MODELS
from peers.collectives import ALL_GATHER, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER
from peers.contenders import (
    DDP,
    DDP_START_UP,
    GLOO,
    GRADSYNC,
    IN_BUCKETS,
    LOCAL_COPY,
    MPICH_ARRAY,
    MPICH_PER_TENSOR,
    OPENMPI_ARRAY,
    THRESHOLDS,
)
from peers.rows import Row
from peers.workload import BUSY, IDLE
from peers.workloads import (
    COLLECTIVE_SIZES_BYTES,
    SIZES_BYTES,
    SMALL_GRADIENTS,
    busy_cores,
    parameter_lists,
    size_name,
    small_gradients,
    thresholds,
)

# From here on the bytes count, and not only the calls.
LARGE_FROM_BYTES = 64 * 2**10
TIMED_COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER, BROADCAST, ALL_TO_ALL)
_SECONDS_OF_A_SMALL_GRADIENT = 4e-6


@dataclass(frozen=True)
class Target:
    """A promise.

    Attributes:
        workload: what is timed.
        limit: of the ratio to the time of the other contender on idle cores; without one, of the time in seconds.
        against: the other contender; "" without one.
        contender: whose promise it is.
        state: of the cores while it is timed.
    """

    workload: str
    limit: float
    against: str = ""
    contender: str = GRADSYNC
    state: str = IDLE


def all_reduce_targets() -> list[Target]:
    """Returns the targets of all_reduce."""
    sizes = [target for size_bytes in SIZES_BYTES for target in _targets_of_size(size_bytes)]
    return [*sizes, *(Target(workload.name, 10.0, GRADSYNC, state=BUSY) for workload in busy_cores())]


def _targets_of_size(size_bytes: int) -> list[Target]:
    workload = size_name(size_bytes)
    if size_bytes < LARGE_FROM_BYTES:
        return [Target(workload, 2.0, OPENMPI_ARRAY)]
    peers = (GLOO, MPICH_ARRAY, OPENMPI_ARRAY) if size_bytes >= 2**20 else (GLOO, MPICH_ARRAY)
    return [Target(workload, 1.0, peer) for peer in peers]


def collective_targets() -> list[Target]:
    """Returns the targets of the other collectives; nothing is promised beside Open MPI."""
    sizes = [
        Target(size_name(size_bytes, collective), 1.0, peer)
        for collective in TIMED_COLLECTIVES
        for size_bytes in COLLECTIVE_SIZES_BYTES
        if size_bytes >= LARGE_FROM_BYTES
        for peer in (GLOO, MPICH_ARRAY)
    ]
    lists = [Target(each.name, 1.0, peer) for each in parameter_lists() for peer in (DDP_START_UP, MPICH_PER_TENSOR)]
    return [*sizes, *lists]


def bucket_targets() -> list[Target]:
    """Returns the targets of lists of gradients, and of the thresholds."""
    return [
        *(Target(model, 1.1, LOCAL_COPY) for model in MODELS),
        *(Target(model, 1 / 6, DDP) for model in MODELS),
        *(Target(model, 0.75, LOCAL_COPY, contender=IN_BUCKETS) for model in MODELS),
        *(Target(each.name, SMALL_GRADIENTS * _SECONDS_OF_A_SMALL_GRADIENT) for each in small_gradients()),
        *(Target(each.name, 1.5, GRADSYNC, contender=name) for each in thresholds() for name in THRESHOLDS),
    ]


def judge(targets: Sequence[Target], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns each target that was measured, with what was measured, and whether it is kept."""
    medians = {(row.workload, row.state, row.contender): row.seconds.median for row in rows if row.seconds}
    found = []
    for target in targets:
        ours = medians.get((target.workload, target.state, target.contender))
        theirs = medians.get((target.workload, IDLE, target.against)) if target.against else 1.0
        if ours is not None and theirs is not None and theirs > 0:  # a difference of two times may be lost in noise
            found.append({**asdict(target), "measured": ours / theirs, "kept": ours <= target.limit * theirs})
    return found
