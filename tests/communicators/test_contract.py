"""The contract suite on every communicator at world sizes 1 to 4; for NCCL on its stand-in, and on a GPU if any."""

from __future__ import annotations

from typing import Any

import pytest

from contract_suite import PARTS, run_part
from coverage_table import Covered, committed, covered
from rank_processes import run_ranks


def run(part: str, world_size: int, kit: str, **options: Any) -> Covered:
    """Returns what the checks of the part have covered."""
    findings = run_ranks(world_size, run_part, part, kit, **options)
    assert not any(found.failure for found in findings), "\n".join(found.failure for found in findings)
    return covered({note for found in findings for note in found.notes})


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("backend", "world_size"), [("local", 1), ("shm", 1), ("shm", 2), ("shm", 3), ("shm", 4)])
def test_contract(part: str, backend: str, world_size: int) -> None:
    found = run(part, world_size, "numpy", backend=backend)
    if (backend, world_size) in (("local", 1), ("shm", 2)):
        assert found == committed(backend, part), "run `python tests/coverage_table.py`"


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_contract_on_the_stand_in_for_nccl(part: str, world_size: int) -> None:
    run(part, world_size, "cupy", backend="nccl", stand_in=True)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_contract_of_host_arrays_on_the_stand_in_for_nccl(part: str, world_size: int) -> None:
    run(part, world_size, "numpy", backend="nccl", stand_in=True)


@pytest.mark.gpu
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kit", ["cupy", "numpy"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_contract_on_nccl(part: str, world_size: int, kit: str) -> None:
    run(part, world_size, kit, backend="nccl", allow_shared_gpu=True, timeout=300.0)
