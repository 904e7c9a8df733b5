"""Checks of the MPI job that this process is part of, without MPI."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gradsync.communicators.mpi.mpi_job import check_place
from gradsync.errors import BackendUnavailable


def mpi_with(rank: int, world_size: int) -> SimpleNamespace:
    world = SimpleNamespace(Get_rank=lambda: rank, Get_size=lambda: world_size)
    return SimpleNamespace(COMM_WORLD=world, Get_library_version=lambda: "MPICH Version: 4.3\nmore\n")


def test_the_same_place_in_mpi_is_accepted() -> None:
    check_place(mpi_with(1, 4), 1, 4)


def test_a_process_that_mpi_has_not_started_is_told_how_to_start() -> None:
    with pytest.raises(BackendUnavailable, match=r"rank 1/4 is alone in MPI_COMM_WORLD: .* \(MPICH Version: 4.3\)"):
        check_place(mpi_with(0, 1), 1, 4)


@pytest.mark.parametrize("place", [(2, 4), (1, 3)])
def test_a_different_place_in_mpi_is_refused(place: tuple[int, int]) -> None:
    with pytest.raises(BackendUnavailable, match=f"rank 1/4 is rank {place[0]} of {place[1]} in MPI_COMM_WORLD"):
        check_place(mpi_with(*place), 1, 4)
