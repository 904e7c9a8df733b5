"""Messages over shared memory: what is sent arrives, whole and in order, and what cannot is told to both ranks."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import expect, seconds_waited
from gradsync import process_group
from gradsync.communicators.agreement import agreement_on
from gradsync.communicators.backend import Message
from gradsync.communicators.shared_memory import barrier as shared_barrier
from rank_processes import run_ranks, run_ranks_for_outcomes


def message(data: Any, peer: int) -> Message:
    return Message(peer, data.view(np.uint8), agreement_on("message", data.shape, data.dtype, ""))


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found while waiting must be certain, however early somebody looks."""
    monkeypatch.setattr(shared_barrier, "_CHECK_EVERY_SECONDS", 0.0)


# Between processes.


def die(comm: Any, victim: int, size: int) -> None:
    array = np.ones(size, np.float32)
    for step in range(1000):
        if comm.rank == victim and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        if comm.rank == 0:
            comm.send(array, 1)
        elif comm.rank == 1:
            comm.recv(array, 0)
        else:
            comm.barrier()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_killed_rank_is_noticed_quickly(victim: int, size: int) -> None:
    started = time.monotonic()
    outcomes = run_ranks_for_outcomes(3, die, victim, size)
    assert time.monotonic() - started < 20
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    for survivor in survivors:
        assert isinstance(survivor.error, gs.RankFailed)
        assert survivor.error.rank == victim
    assert len({str(survivor.error).partition(": ")[2] for survivor in survivors}) == 1


def stay_away(comm: Any) -> Any:
    array = np.ones(10**6, np.float32)
    if comm.rank == 1:
        client: Any = process_group._client
        expect(gs.CollectiveTimeout, lambda: client.get("nobody sets this", timeout_seconds=30.0))
        error = expect(gs.CollectiveTimeout, lambda: comm.recv(array, 0))
    else:
        error = expect(gs.CollectiveTimeout, lambda: comm.send(array, 1))
    assert expect(gs.CommunicatorClosed, comm.barrier)
    return error.missing_ranks, str(error).partition(": ")[2]


def test_the_deadline_is_told_on_both_ranks() -> None:
    first, second = run_ranks(2, stay_away, collective_timeout_seconds=0.5)
    assert first == second
    assert first[0] == (1,)
    assert 0.5 <= seconds_waited(first[1]) < 15.0  # the server ends the wait of the other rank after 30 s
