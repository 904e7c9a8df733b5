"""The contract suite over MPI: MPICH with 1 to 4 ranks, other MPIs, and by the collectives of MPI itself."""

from __future__ import annotations

from typing import Any

import pytest
from contract_places import MpiRanks
from cross_check_launch import Mpi

from contract_suite import PARTS


def check(world_size: int, mpi: Mpi, parts: list[str], **options: Any) -> None:
    """Runs parts one after the other on the same ranks: mpiexec takes longer to start them than most parts take."""
    found = MpiRanks(world_size, mpi).run_parts(parts, seconds=300.0, **options)
    assert found.keys() == set(parts)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_contract_on_mpi(mpich: Mpi, world_size: int) -> None:
    check(world_size, mpich, list(PARTS))


@pytest.mark.parametrize("vendor", ["open_mpi", "intel_mpi"])
def test_contract_on_other_mpis(request: pytest.FixtureRequest, vendor: str) -> None:
    check(3, request.getfixturevalue(vendor), list(PARTS))


def test_contract_by_the_collectives_of_mpi_itself(mpich: Mpi) -> None:
    """As among many ranks, and of large arrays. Its reductions give the bits that they give, in another order."""
    parts = [part for part in PARTS if part not in ("groups", "refusals")]
    check(3, mpich, parts, more={"GRADSYNC_TEST_NATIVE_MPI": "1"})
