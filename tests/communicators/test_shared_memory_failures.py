"""What goes wrong between the ranks of the shared-memory communicator, and that it is told at once."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import expect
from gradsync import process_group
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.shared_memory import segment
from gradsync.communicators.shared_memory import shm_backend as shared_memory
from rank_processes import run_ranks


def count_resources(comm: Any) -> list[tuple[int, int, int]]:
    """Descriptors, memory maps and threads after each of several create-use-close cycles."""
    counts = []
    client = process_group._client
    for cycle in range(12):
        with Communicator(shared_memory.connect_shared_memory(client, f"cycle {cycle}", 60.0, 60.0)) as extra:
            array = np.full(300_000, float(extra.rank))
            extra.all_reduce(array)
            del array
        comm.barrier()
        with open("/proc/self/maps") as maps:
            mapped = sum("memfd:gradsync" in line for line in maps)
        counts.append((len(os.listdir("/proc/self/fd")), mapped, threading.active_count()))
    return counts


def test_nothing_leaks() -> None:
    for counts in run_ranks(2, count_resources):
        assert len(set(counts[2:])) == 1, counts


def test_other_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment.platform, "machine", lambda: "aarch64")
    with pytest.raises(gs.BackendUnavailable, match="on x86-64, this is linux on aarch64"):
        segment.check_platform()


def fail_while_joining(comm: Any) -> str:
    gs.destroy_process_group()
    if comm.rank == 1:

        def refuse(descriptor: int) -> None:
            os.close(descriptor)
            raise gs.BackendUnavailable("no room")

        shared_memory.map_segment = refuse
    started = time.monotonic()
    error = expect(gs.GradsyncError, gs.init_process_group)
    assert time.monotonic() - started < 20  # the ranks have 30 s to meet
    assert process_group._client is None
    return f"{type(error).__name__}: {error}"


def fail_to_make(comm: Any) -> str:
    gs.destroy_process_group()
    if comm.rank == 0:

        def give_up(_size_bytes: int) -> int:
            raise gs.BackendUnavailable("no room")

        shared_memory.create_segment = give_up
    error = expect(gs.GradsyncError, gs.init_process_group)
    return f"{type(error).__name__}: {error}"


def test_a_root_without_memory_tells_the_others_why() -> None:
    failed, *told = run_ranks(3, fail_to_make)
    assert failed == "BackendUnavailable: no room"
    for text in told:
        assert text.startswith("RankFailed: ")
        assert "no room" in text


def test_a_failure_inside_init_reaches_the_others() -> None:
    told, failed = run_ranks(2, fail_while_joining)
    assert failed == "BackendUnavailable: no room"
    assert told.startswith("RankFailed")
    assert "no room" in told
