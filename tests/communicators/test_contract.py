"""The contract suite on every communicator at world sizes 1 to 4; for NCCL on its stand-in, and on a GPU if any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from contract_suite import PARTS
from coverage_table import COMMUNICATORS, ON_GPU, STAND_IN, Covered, MpiRanks, Ranks, committed, ranks_for
from cross_check_launch import Mpi


class Contract:
    """Runs parts of the contract, on the same ranks for as long as they are to be such."""

    def __init__(self) -> None:
        self._ranks: Ranks | MpiRanks | None = None
        self._which: Any = None

    def run(self, part: str, world_size: int, kit: str, options: dict[str, Any]) -> Covered:
        """Returns what the checks of the part have covered."""
        if self._ranks is None or self._which != (world_size, options):
            self.close()
            self._ranks, self._which = ranks_for(world_size, options), (world_size, options)
        return self._ranks.run(part, kit)

    def run_and_compare(self, communicator: str, part: str, world_size: int, kit: str) -> None:
        """Runs a part, and compares what it has covered with what the table of docs/collectives.md is made of."""
        found = self.run(part, world_size, kit, COMMUNICATORS[communicator].options)
        assert found == committed(communicator, part, world_size, kit), f"run `python tests/coverage_table.py {part}`"

    def close(self) -> None:
        """Ends the ranks."""
        if self._ranks is not None:
            self._ranks.close()


@pytest.fixture(scope="module")
def contract() -> Iterator[Contract]:
    made = Contract()
    yield made
    made.close()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("backend", "world_size"), [("local", 1), ("shm", 1), ("shm", 2), ("shm", 3), ("shm", 4)])
def test_contract(contract: Contract, part: str, backend: str, world_size: int) -> None:
    contract.run_and_compare(backend, part, world_size, "numpy")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_contract_on_the_stand_in_for_nccl(contract: Contract, part: str, world_size: int) -> None:
    contract.run_and_compare(STAND_IN, part, world_size, "cupy")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_contract_of_host_arrays_on_the_stand_in_for_nccl(contract: Contract, part: str, world_size: int) -> None:
    contract.run_and_compare(STAND_IN, part, world_size, "numpy")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_contract_on_mpi(contract: Contract, mpich: Mpi, part: str, world_size: int) -> None:
    contract.run_and_compare("mpi", part, world_size, "numpy")


@pytest.mark.parametrize("vendor", ["open_mpi", "intel_mpi"])
def test_contract_on_other_mpis(request: pytest.FixtureRequest, vendor: str) -> None:
    found = MpiRanks(3, request.getfixturevalue(vendor)).run_parts(list(PARTS), seconds=110.0)
    assert found == {part: committed("mpi", part, 3, "numpy") for part in PARTS}


def test_contract_by_the_collectives_of_mpi_itself(mpich: Mpi) -> None:
    """As among many ranks, and of large arrays. Its reductions give the bits that they give, in another order."""
    parts = [part for part in PARTS if part not in ("groups", "refusals")]
    found = MpiRanks(3).run_parts(parts, more={"GRADSYNC_TEST_NATIVE_MPI": "1"}, seconds=110.0)
    assert found == {part: committed("mpi", part, 3, "numpy") for part in parts}


@pytest.mark.gpu
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kit", ["cupy", "numpy"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_contract_on_nccl(contract: Contract, part: str, world_size: int, kit: str) -> None:
    contract.run(part, world_size, kit, ON_GPU.options)
