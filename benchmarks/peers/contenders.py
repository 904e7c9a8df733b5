"""The names of all contenders, and their systems."""

from __future__ import annotations

GRADSYNC = "gradsync"
TORCH = "torch"
OPENMPI = "openmpi"
MPICH = "mpich"
SYSTEMS = (GRADSYNC, TORCH, OPENMPI, MPICH)

LOCAL_COPY = "local copy"
IN_BUCKETS = "gradsync, bucket views"
BY_HAND = "concatenate, all_reduce, split"
DDP = "DDP on gloo"
DDP_VIEWS = "DDP on gloo, bucket views"
DDP_START_UP = "DDP's start-up broadcast on gloo"
GLOO_BUCKETS = "gloo, 25 MB buckets"
OPENMPI_PER_TENSOR = "Open MPI per tensor"
OPENMPI_FLAT = "Open MPI flat"
MPICH_PER_TENSOR = "MPICH per tensor"
MPICH_FLAT = "MPICH flat"
GLOO = "gloo"
OPENMPI_ARRAY = "Open MPI"
MPICH_ARRAY = "MPICH"


def whole_backward(ddp: str) -> str:
    """Returns the name of the backward pass with the reduction `ddp`."""
    return f"{ddp}: backward"


def local_backward(ddp: str) -> str:
    """Returns the name of the same backward pass without the reduction."""
    return f"{ddp}: backward in no_sync"


#: Thresholds of gradsync's callback, by the names of the contenders, in bytes.
THRESHOLDS = {f"threshold {size:g} MB": round(size * 2**20) for size in (0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)}
NONFINITE = "nonfinite raise"
NORM = "norm computed"
CLIPPED = "norm clipped, each step"
PARAMETERS = "parameters told"
KNOBS = (NONFINITE, NORM, CLIPPED, PARAMETERS)

# The time of a reduction by DDP is the difference of two contenders.
DIFFERENCES = {ddp: (whole_backward(ddp), local_backward(ddp)) for ddp in (DDP, DDP_VIEWS)}

OF_A_LIST = {
    GRADSYNC: GRADSYNC,
    IN_BUCKETS: GRADSYNC,
    BY_HAND: GRADSYNC,
    LOCAL_COPY: GRADSYNC,
    whole_backward(DDP): TORCH,
    local_backward(DDP): TORCH,
    whole_backward(DDP_VIEWS): TORCH,
    local_backward(DDP_VIEWS): TORCH,
    GLOO_BUCKETS: TORCH,
    OPENMPI_PER_TENSOR: OPENMPI,
    OPENMPI_FLAT: OPENMPI,
    MPICH_PER_TENSOR: MPICH,
    MPICH_FLAT: MPICH,
}
OF_AN_ARRAY = {GRADSYNC: GRADSYNC, GLOO: TORCH, OPENMPI_ARRAY: OPENMPI, MPICH_ARRAY: MPICH}
OF_PARAMETERS = {
    GRADSYNC: GRADSYNC,
    DDP_START_UP: TORCH,
    OPENMPI_PER_TENSOR: OPENMPI,
    MPICH_PER_TENSOR: MPICH,
}
