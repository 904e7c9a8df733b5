"""Ranks of several machines train together over MPI; a machine that is cut off is noticed on both sides."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cross_check_launch import Mpi, run_on_gradsync
from mpi_machines import NCCL_RANK, TRAINING, MpiJob, await_told, check_ranks_over_nccl
from namespaces import left_behind, machines, why_none

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def job(mpich: Mpi, tmp_path: Path) -> Iterator[MpiJob]:
    reason = why_none()
    if reason is not None:
        pytest.skip(reason)
    with machines(2) as made, closing(MpiJob(made, tmp_path)) as job:
        yield job


def test_two_machines_train_as_one_does(job: MpiJob, tmp_path: Path) -> None:
    job.start(2)
    code, told = job.end(100.0)
    assert code == 0, told
    ended = job.await_ended(1.0)
    assert [rank["host"] for rank in ended] == ["host0", "host0", "host1", "host1"]
    assert {started["backend"] for started in job.await_started(1.0)} == {"mpi"}
    (tmp_path / "shm").mkdir()
    run_on_gradsync(4, tmp_path / "shm", str(TRAINING), str(tmp_path / "shm"), "2")
    over_shm = await_told("ended", tmp_path / "shm", 4, 1.0)
    assert {rank["digest"] for rank in ended} == {rank["digest"] for rank in over_shm}
    assert left_behind(job.machines) == []


@pytest.mark.parametrize("cut", ["take_link_down", "drop_packets"])
def test_both_sides_are_told_when_a_machine_is_cut_off(job: MpiJob, cut: str) -> None:
    job.start(100_000)
    job.await_started()
    getattr(job.machines[1], cut)()
    began = time.time()
    # Of each side one rank at least: who is told first ends the job, half a second later.
    near, far = job.await_any_ended([0, 1]), job.await_any_ended([2, 3])
    for found, host in ((near, "host0"), (far, "host1")):
        assert found["host"] == host
        assert found["error"] in ("RankFailed", "RendezvousError"), found
        assert found["at"] - began < 15.0  # 3 s, and 6 s by the kernel, on a machine with nothing else to do
    assert "rank 2/4" in near["text"] or "rank 3/4" in near["text"], near
    assert "acknowledges nothing" in near["text"], near
    assert "rendezvous server" in far["text"], far
    job.machines[1].rejoin()  # mpiexec ends what is left of its job
    code, _ = job.end()
    assert code != 0
    assert left_behind(job.machines) == []


def test_ranks_of_mpiexec_begin_nccl_on_several_machines(job: MpiJob, tmp_path: Path) -> None:
    """MPI tells where the ranks meet, and the id of NCCL's communicator comes from there; on NCCL's stand-in."""
    with closing(MpiJob(job.machines, tmp_path, script=NCCL_RANK)) as over_nccl:
        over_nccl.start(job.machines[0].ipv4)
        code, told = over_nccl.end(60.0)
        assert code == 0, told
        check_ranks_over_nccl(over_nccl.await_ended(1.0))
