"""The name of a run whose launcher does not tell where to meet: the same for its ranks, another for any other run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOW = "from gradsync.environment import read_environment; print(read_environment().run_name)"
# The variables of a rank: its rank and local rank, the world size and the local one.
LAUNCHERS = {
    "OpenMPI": (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
        *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    "PMI": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),
}
# Stands for a launcher: starts ranks 0 and 1, each by what its arguments say.
LAUNCHER = """
import os, subprocess, sys
names, command = sys.argv[1:5], sys.argv[5:]
for rank in "01":
    own = dict(zip(names, [rank, rank, "2", "2"]))
    subprocess.run(command, env={**os.environ, **own}, check=True)
"""


def names_of_ranks(launcher: str, command: list[str], **outer: str) -> list[str]:
    run = [sys.executable, "-c", LAUNCHER, *LAUNCHERS[launcher], *command, sys.executable, "-c", SHOW]
    done = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True, timeout=60, env={**os.environ, **outer})
    return done.stdout.split()


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
@pytest.mark.parametrize("command", [[], ["sh", "-c", 'sh -c \'"$0" "$@"; exit $?\' "$0" "$@"; exit $?']])
def test_ranks_of_a_run_find_the_same_name(launcher: str, command: list[str]) -> None:
    first, second = names_of_ranks(launcher, command)
    assert first == second
    assert first.startswith(f"{launcher}-")
    assert set(names_of_ranks(launcher, command)) != {first}


def test_a_launcher_inside_a_rank_of_another_is_told_apart() -> None:
    first, second = names_of_ranks("PMI", [], PMI_RANK="1", PMI_SIZE="7")
    assert first == second
