"""The contract suite: local, shm with 1 to 3 ranks, the stand-in for NCCL with 2, and NCCL on a GPU if any.

More ranks, host arrays over NCCL and MPI: tests/prove/cross_checks and tests/prove/mpi.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from contract import IS_EVERYWHERE
from contract_suite import PARTS, run_part_anew, run_part_over_pipes
from rank_pool import RankPool


class Contract:
    """Runs parts of the contract, on the same ranks for as long as they are to be such."""

    def __init__(self) -> None:
        self._ranks: RankPool | None = None
        self._which: Any = None

    def run(self, part: str, world_size: int, kit: str, *, timeout: float = 100.0, **options: Any) -> None:
        if self._ranks is None or self._which != (world_size, options):
            self.close()
            self._ranks, self._which = RankPool(world_size, **options), (world_size, options)
        of_group = {name: value for name, value in options.items() if name != "stand_in"}
        self._ranks.run(run_part_anew, part, kit, of_group, timeout=timeout)

    def run_over_pipes(self, part: str, world_size: int) -> None:
        options = {"backend": "shm"}
        if self._ranks is None or self._which != (world_size, options):
            self.close()
            self._ranks, self._which = RankPool(world_size, **options), (world_size, options)
        self._ranks.run(run_part_over_pipes, part, timeout=100.0)

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
@pytest.mark.parametrize(("backend", "world_size"), [("local", 1), ("shm", 1), ("shm", 2), ("shm", 3)])
def test_contract(contract: Contract, part: str, backend: str, world_size: int) -> None:
    contract.run(part, world_size, "numpy", backend=backend)


@pytest.mark.parametrize("part", PARTS)
def test_contract_on_the_stand_in_for_nccl(contract: Contract, part: str) -> None:
    contract.run(part, 2, "cupy", backend="nccl", stand_in=True)


@pytest.mark.gpu
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kit", ["cupy", "numpy"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_contract_on_nccl(contract: Contract, part: str, world_size: int, kit: str) -> None:
    contract.run(part, world_size, kit, timeout=300.0, backend="nccl", allow_shared_gpu=True)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("world_size", [1, 2, 3] if IS_EVERYWHERE else [2])
def test_contract_on_a_backend_of_one_file(contract: Contract, part: str, world_size: int) -> None:
    """As docs/architecture.md says: whoever writes these methods has a communicator."""
    contract.run_over_pipes(part, world_size)
