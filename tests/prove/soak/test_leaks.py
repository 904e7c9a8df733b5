"""Nothing stays of groups and process groups that are closed; `make soak` runs more cycles of the same."""

from __future__ import annotations

import mmap
from multiprocessing import Pipe
from typing import Any

import pytest
from leaks import KINDS, grown

from rank_processes import run_ranks

CYCLES = {"groups": 80, "process groups": 80, "abandoned groups": 30}


def leaked(comm: Any, kind: str) -> list[str]:
    return KINDS[kind](comm, CYCLES[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("backend", "world_size"), [("local", 1), ("shm", 2)])
def test_nothing_stays(kind: str, backend: str, world_size: int) -> None:
    assert run_ranks(world_size, leaked, kind, backend=backend) == [[]] * world_size


def touched_pages(size: int) -> mmap.mmap:
    pages = mmap.mmap(-1, size)
    pages.write(b"x" * size)
    return pages


def test_a_leak_is_told() -> None:
    kept: list[Any] = []
    # Pages of their own: what the allocator has kept of freed memory would not grow the process.
    found = grown(lambda number: kept.append((Pipe(), touched_pages(4 * 2**20))), 10)
    for first, second in (pipe for pipe, _ in kept):
        first.close()
        second.close()
    assert [text.partition(":")[0] for text in found] == ["descriptors", "shared_maps", "memory"]
