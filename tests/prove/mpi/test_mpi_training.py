"""Training over MPI is training over shared memory, bit for bit."""

from __future__ import annotations

from pathlib import Path

from cross_check_launch import Mpi, run_on_gradsync

RANK = str(Path(__file__).parent / "mpi_training_rank.py")
ROOT = Path(__file__).parents[3]


def test_training_under_mpiexec_equals_training_over_shared_memory(mpich: Mpi, tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    over_mpi = mpich.run_script(4, tmp_path, RANK, more={"GRADSYNC_BACKEND": "mpi"}, seconds=110.0).splitlines()
    over_shm = run_on_gradsync(4, tmp_path / "shm", RANK).splitlines()
    (mpi,), (shm,) = set(over_mpi), set(over_shm)
    assert mpi.split()[0] == "mpi"
    assert shm.split()[0] == "shm"
    assert mpi.split()[1:] == shm.split()[1:]
    assert mpi.split()[2] == "True"


def test_the_example_runs_under_mpiexec_as_it_is(mpich: Mpi, tmp_path: Path) -> None:
    """Ranks of one machine share memory, whoever has started them."""
    script = str(ROOT / "examples" / "train_digits.py")
    told = mpich.run_script(2, tmp_path, script, "--epochs", "1", more={"GRADSYNC_LOG": "info"}, seconds=110.0)
    assert "backend shm" in told
