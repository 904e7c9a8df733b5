"""Nothing stays of groups and process groups that are closed; `make soak` runs more cycles of the same."""

from __future__ import annotations

from multiprocessing import Pipe
from typing import Any

import pytest

from leaks import KINDS, grown
from rank_processes import run_ranks

CYCLES = {"groups": 200, "process groups": 200, "abandoned groups": 50}


def leaked(comm: Any, kind: str) -> list[str]:
    return KINDS[kind](comm, CYCLES[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("backend", "world_size"), [("local", 1), ("shm", 2)])
def test_nothing_stays(kind: str, backend: str, world_size: int) -> None:
    assert run_ranks(world_size, leaked, kind, backend=backend) == [[]] * world_size


def test_a_leak_is_told() -> None:
    kept: list[Any] = []
    descriptors, memory = grown(lambda number: kept.append((Pipe(), bytearray(1_000_000))), 10)
    for first, second in (pipe for pipe, _ in kept):
        first.close()
        second.close()
    assert descriptors.startswith("descriptors: ")
    assert memory.startswith("memory: ")
