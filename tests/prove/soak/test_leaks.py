"""Nothing stays of groups and process groups that are closed; `make soak` runs more cycles of the same."""

from __future__ import annotations

from typing import Any

import pytest
from leaks import KINDS

from rank_processes import run_ranks

CYCLES = {"groups": 80, "process groups": 80, "abandoned groups": 30}


def leaked(comm: Any, kind: str) -> list[str]:
    return KINDS[kind](comm, CYCLES[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("backend", "world_size"), [("local", 1), ("shm", 2)])
def test_nothing_stays(kind: str, backend: str, world_size: int) -> None:
    assert run_ranks(world_size, leaked, kind, backend=backend) == [[]] * world_size
