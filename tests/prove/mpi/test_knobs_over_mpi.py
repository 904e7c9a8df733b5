"""AllreduceCallback over MPI: its knobs, bit for bit as the naive reference; and two that are used crosswise."""

from __future__ import annotations

from pathlib import Path

from cross_check_launch import Mpi

HERE = Path(__file__).parent
RANK = str(HERE / "mpi_knob_rank.py")


def test_knobs_over_mpi(mpich: Mpi, tmp_path: Path) -> None:
    told = mpich.run_script(3, tmp_path, RANK, seconds=110.0)
    assert told.count("has come through all checks") == 3


def test_crosswise_callbacks_over_mpi(mpich: Mpi, tmp_path: Path) -> None:
    told = mpich.run_script(3, tmp_path, str(HERE / "mpi_crosswise_rank.py"), seconds=90.0)
    assert told.count("has come through all checks") == 3
