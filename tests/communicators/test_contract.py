"""The contract suite on every communicator at world sizes 1 to 4; for NCCL on its stand-in, and on a GPU if any."""

from __future__ import annotations

from typing import Any

import pytest

import contract
from rank_processes import run_ranks


def run_contract(world_size: int, kit: str, **options: Any) -> None:
    failures = run_ranks(world_size, contract.run_all_checks, kit, **options)
    assert failures == [{}] * world_size, "\n".join(str(f) for rank in failures for f in rank.values())


@pytest.mark.parametrize(("backend", "world_size"), [("local", 1), ("shm", 1), ("shm", 2), ("shm", 3), ("shm", 4)])
def test_contract(backend: str, world_size: int) -> None:
    run_contract(world_size, "numpy", backend=backend)


@pytest.mark.parametrize("kit", ["cupy", "numpy"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_contract_on_the_stand_in_for_nccl(world_size: int, kit: str) -> None:
    run_contract(world_size, kit, backend="nccl", stand_in=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kit", ["cupy", "numpy"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_contract_on_nccl(world_size: int, kit: str) -> None:
    run_contract(world_size, kit, backend="nccl", allow_shared_gpu=True, timeout=300.0)
