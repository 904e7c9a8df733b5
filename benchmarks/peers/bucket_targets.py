"""The promises about buckets: against a local copy, against the peers, and of the callback's settings."""

from __future__ import annotations

from models import MODELS
from peers.contenders import (
    BY_HAND,
    DDP,
    DDP_VIEWS,
    GLOO_BUCKETS,
    GRADSYNC,
    IN_BUCKETS,
    KNOBS,
    LOCAL_COPY,
    MPICH_FLAT,
    MPICH_PER_TENSOR,
    OPENMPI_FLAT,
    OPENMPI_PER_TENSOR,
    THRESHOLDS,
)
from peers.targets import Target
from peers.workload import BUSY
from peers.workloads import SMALL_GRADIENTS, gradient_lists, knobs, small_gradients, thresholds

PEERS = (DDP, DDP_VIEWS, GLOO_BUCKETS, OPENMPI_PER_TENSOR, OPENMPI_FLAT, MPICH_PER_TENSOR, MPICH_FLAT)
OURS = (GRADSYNC, IN_BUCKETS)
MICROSECOND = 1e-6
UNIT = "us a gradient"


def bucket_targets() -> list[Target]:
    """Returns the targets, in the order of the pages; targets without limits are only shown."""
    lists = [*gradient_lists(), *small_gradients()]
    return [
        *(target for model in MODELS for target in _of_model(model)),
        *(target for workload in small_gradients() for target in _of_small(workload.name)),
        *(target for workload in lists if BUSY in workload.states for target in _beside_busy(workload.name)),
        *(target for workload in thresholds() for target in _of_thresholds(workload.name)),
        *(Target(workload.name, (GRADSYNC,), contender=knob) for workload in knobs() for knob in KNOBS),
    ]


def _of_model(model: str) -> list[Target]:
    return [
        Target(model, (LOCAL_COPY,), must=1.1, reach=0.9),
        Target(model, (DDP,), must=1 / 6),
        Target(model, (OPENMPI_PER_TENSOR,), reach=1 / 1.5),
        Target(model, (BY_HAND,)),
        Target(model, (LOCAL_COPY,), must=0.75, reach=0.6, contender=IN_BUCKETS),
        Target(model, PEERS, reach=1 / 2.5, contender=IN_BUCKETS),
    ]


def _of_small(workload: str) -> list[Target]:
    each = SMALL_GRADIENTS * MICROSECOND
    return [
        Target(workload, (), must=4.0, reach=2.0, unit=UNIT, unit_seconds=each),
        Target(workload, (), unit=UNIT, unit_seconds=each, contender=IN_BUCKETS),
        Target(workload, (BY_HAND,)),
    ]


def _beside_busy(workload: str) -> list[Target]:
    return [
        Target(workload, against, state=BUSY, against_state=BUSY, contender=ours)
        for ours in OURS
        for against in ((LOCAL_COPY,), PEERS)
    ]


def _of_thresholds(workload: str) -> list[Target]:
    fixed = tuple(THRESHOLDS)
    return [Target(workload, fixed, must=1.5, reach=1.2, contender=name) for name in fixed]
