"""The contract suite over MPI: MPICH with 1 to 4 ranks, other MPIs, and by the collectives of MPI itself."""

from __future__ import annotations

import pytest
from coverage_table import MpiRanks, committed
from cross_check_launch import Mpi

from contract_suite import PARTS


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_contract_on_mpi(mpich: Mpi, part: str, world_size: int) -> None:
    assert MpiRanks(world_size).run(part, "numpy") == committed("mpi", part, world_size, "numpy")


@pytest.mark.parametrize("vendor", ["open_mpi", "intel_mpi"])
def test_contract_on_other_mpis(request: pytest.FixtureRequest, vendor: str) -> None:
    found = MpiRanks(3, request.getfixturevalue(vendor)).run_parts(list(PARTS), seconds=110.0)
    assert found == {part: committed("mpi", part, 3, "numpy") for part in PARTS}


def test_contract_by_the_collectives_of_mpi_itself(mpich: Mpi) -> None:
    """As among many ranks, and of large arrays. Its reductions give the bits that they give, in another order."""
    parts = [part for part in PARTS if part not in ("groups", "refusals")]
    found = MpiRanks(3).run_parts(parts, more={"GRADSYNC_TEST_NATIVE_MPI": "1"}, seconds=110.0)
    assert found == {part: committed("mpi", part, 3, "numpy") for part in parts}
