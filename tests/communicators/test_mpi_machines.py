"""Ranks of several machines train together over MPI; a machine that is cut off is noticed on both sides."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cross_check_launch import Mpi, run_on_gradsync
from mpi_machines import RANK, MpiJob, await_told
from namespaces import left_behind, machines, why_none

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def job(mpich: Mpi, tmp_path: Path) -> Iterator[MpiJob]:
    reason = why_none()
    if reason is not None:
        pytest.skip(reason)
    with machines(2) as made:
        yield MpiJob(made, tmp_path)


def test_two_machines_train_as_one_does(job: MpiJob, tmp_path: Path) -> None:
    job.start(epochs=2)
    code, told = job.end(100.0)
    assert code == 0, told
    ended = job.await_ended(1.0)
    assert [rank["host"] for rank in ended] == ["host0", "host0", "host1", "host1"]
    assert {started["backend"] for started in job.await_started(1.0)} == {"mpi"}
    (tmp_path / "shm").mkdir()
    run_on_gradsync(4, tmp_path / "shm", str(RANK), str(tmp_path / "shm"), "2")
    over_shm = await_told("ended", tmp_path / "shm", 4, 1.0)
    assert {rank["digest"] for rank in ended} == {rank["digest"] for rank in over_shm}
    assert left_behind(job.machines) == []


@pytest.mark.parametrize("cut", ["take_link_down", "drop_packets"])
def test_both_sides_are_told_when_a_machine_is_cut_off(job: MpiJob, cut: str) -> None:
    job.start(epochs=100_000)
    job.await_started()
    getattr(job.machines[1], cut)()
    began = time.time()
    ended = job.await_ended(40.0)
    for rank, found in enumerate(ended):
        assert found["host"] == f"host{rank // 2}"
        assert found["error"] in ("RankFailed", "RendezvousError"), found
        assert found["at"] - began < 15.0  # 3 s, and 6 s by the kernel, on a machine with nothing else to do
    for found in ended[:2]:
        assert "rank 2/4" in found["text"] or "rank 3/4" in found["text"], found
        assert "acknowledges nothing" in found["text"], found
    for found in ended[2:]:
        assert "rendezvous server" in found["text"], found
    job.machines[1].rejoin()  # mpiexec ends what is left of its job
    code, _ = job.end()
    assert code != 0
    assert left_behind(job.machines) == []
