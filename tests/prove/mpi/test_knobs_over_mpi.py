"""The knobs of an AllreduceCallback over MPI: bit for bit what the naive reference gives."""

from __future__ import annotations

from pathlib import Path

from cross_check_launch import Mpi

RANK = str(Path(__file__).parent / "mpi_knob_rank.py")


def test_knobs_over_mpi(mpich: Mpi, tmp_path: Path) -> None:
    told = mpich.run_script(3, tmp_path, RANK, seconds=110.0)
    assert told.count("has come through 20 checks") == 3
