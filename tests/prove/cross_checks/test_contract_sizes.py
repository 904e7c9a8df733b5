"""The contract suite at world sizes 1 to 4, for NCCL on its stand-in; it covers what the pages say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from coverage_table import COMMUNICATORS, STAND_IN, Covered, MpiRanks, Ranks, committed, ranks_for

from contract_suite import PARTS


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
        assert found == committed(communicator, part, world_size, kit), (
            f"run `python tests/prove/pages/coverage_table.py {part}`"
        )

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
def test_contract_of_sizes(contract: Contract, part: str, backend: str, world_size: int) -> None:
    contract.run_and_compare(backend, part, world_size, "numpy")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_contract_on_the_stand_in_for_nccl(contract: Contract, part: str, world_size: int) -> None:
    contract.run_and_compare(STAND_IN, part, world_size, "cupy")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_contract_of_host_arrays_on_the_stand_in_for_nccl(contract: Contract, part: str, world_size: int) -> None:
    contract.run_and_compare(STAND_IN, part, world_size, "numpy")
