"""The contract suite on every communicator at world sizes 1 to 4."""

from __future__ import annotations

import pytest

import contract
from rank_processes import run_ranks


@pytest.mark.parametrize(("backend", "world_size"), [("local", 1), ("shm", 1), ("shm", 2), ("shm", 3), ("shm", 4)])
def test_contract(backend: str, world_size: int) -> None:
    failures = run_ranks(world_size, contract.run_all_checks, backend=backend)
    assert failures == [{}] * world_size, "\n".join(str(f) for rank in failures for f in rank.values())
