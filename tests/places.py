"""Where a check on ranks runs: the backend, the kind of arrays it is given, and what the machine must have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from contract import IS_EVERYWHERE
from kits import end_together
from rank_processes import Outcome, run_ranks, run_ranks_for_outcomes


def why_no_gpu() -> str | None:
    """Returns why GPU tests cannot run here, or None when they can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported: {error}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return f"no usable GPU: {error}"
    return None if count else "CuPy sees no GPU"


class Place(NamedTuple):
    """A backend and its arrays.

    Attributes:
        name: in the names of tests.
        kit: see kits.py.
        options: for run_ranks.
        marks: of the tests there.
    """

    name: str
    kit: str
    options: dict[str, Any]
    marks: tuple[pytest.MarkDecorator, ...] = ()

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Runs function(communicator, *args) on every rank; see run_ranks."""
        return run_ranks(world_size, end_together, function, *args, **self._with(options))

    def outcomes(self, world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Outcome]:
        """The same, with the errors of the ranks returned; see run_ranks_for_outcomes."""
        return run_ranks_for_outcomes(world_size, end_together, function, *args, **self._with(options))

    def _with(self, options: dict[str, Any]) -> dict[str, Any]:
        environment = {**self.options.get("environment", {}), **options.get("environment", {})}
        return {**self.options, **options, "environment": environment}


_STAND_IN = {"backend": "nccl", "stand_in": True}
_GPU = {"backend": "nccl", "allow_shared_gpu": True, "timeout": 25.0}  # a test on a GPU has 30 s: make test-gpu

SHM = Place("shm", "numpy", {"backend": "shm"})
STAND_IN = Place("stand-in", "cupy", _STAND_IN)
STAND_IN_STAGED = Place("stand-in, host arrays", "numpy", _STAND_IN)
STAND_IN_MIXED = Place("stand-in, mixed arrays", "mixed", _STAND_IN)
# Pauses on every stream: work that does not wait for what it needs gives wrong results.
STAND_IN_SLOW = Place("slow stand-in", "cupy", {**_STAND_IN, "environment": {"FAKE_CUPY_DELAY_MS": "2"}})
# A collective that misses a rank hangs, as on a GPU, instead of telling so.
STAND_IN_STUCK = Place("stuck stand-in", "cupy", {**_STAND_IN, "environment": {"FAKE_CUPY_HANG": "1"}})
GPU = Place("gpu", "cupy", _GPU, (pytest.mark.gpu,))
GPU_STAGED = Place("gpu, host arrays", "numpy", _GPU, (pytest.mark.gpu,))
GPU_MIXED = Place("gpu, mixed arrays", "mixed", _GPU, (pytest.mark.gpu,))


_NOT_IN_MAKE_TEST = {STAND_IN_STAGED.name, STAND_IN_MIXED.name, STAND_IN_SLOW.name}
_ON_TWO_RANKS = {STAND_IN.name, STAND_IN_STUCK.name}


def on(place: Place, *world_sizes: int) -> list[Any]:
    """Returns test parameters (place, world_size): those that `make test` runs, or all with GRADSYNC_TEST_PLACES.

    `make test` has two ranks of the stand-in, and of the sizes of shared memory one rank and the largest: the contract
    suite runs on every size.
    """
    if IS_EVERYWHERE:
        return always_on(place, *world_sizes)
    if place.name in _NOT_IN_MAKE_TEST:
        return []
    if place.name in _ON_TWO_RANKS:
        return always_on(place, *(n for n in world_sizes if n == 2))
    if place.name == SHM.name:
        return always_on(place, *(n for n in world_sizes if n == 1 or n == max(world_sizes)))
    return always_on(place, *world_sizes)


def always_on(place: Place, *world_sizes: int) -> list[Any]:
    """The same, also in `make test`: for checks for which that place has a path of its own."""
    return [pytest.param(place, n, id=f"{place.name}, {n}", marks=place.marks) for n in world_sizes]
