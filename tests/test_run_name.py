"""The name of a run whose launcher does not tell where to meet: the same for its ranks, another for any other run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOW = "import os; from gradsync.launcher_variables import name_run; print(name_run(os.environ, {source!r}))"
OPEN_MPI = ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
PMI = ("PMI", "PMI_RANK", "PMI_SIZE")
# Stands for a launcher: starts ranks 0 and 1, each by what its arguments say.
LAUNCHER = """
import os, subprocess, sys
rank_name, size_name, *command = sys.argv[1:]
for rank in "01":
    subprocess.run(command, env={**os.environ, rank_name: rank, size_name: "2"}, check=True)
"""


def names_of_ranks(launcher: tuple[str, str, str], command: list[str]) -> list[str]:
    source, *variables = launcher
    rank = [sys.executable, "-c", SHOW.format(source=source)]
    run = [sys.executable, "-c", LAUNCHER, *variables, *command, *rank]
    return subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout.split("\n")[:-1]


@pytest.mark.parametrize("launcher", [OPEN_MPI, PMI], ids=["Open MPI", "PMI"])
@pytest.mark.parametrize("command", [[], ["sh", "-c", 'sh -c \'"$0" "$@"; exit $?\' "$0" "$@"; exit $?']])
def test_ranks_of_a_run_find_the_same_name(launcher: tuple[str, str, str], command: list[str]) -> None:
    first, second = names_of_ranks(launcher, command)
    assert first == second
    assert first.startswith(f"{launcher[0].replace(' ', '')}-")
    assert set(names_of_ranks(launcher, command)) != {first}


def test_a_launcher_inside_a_rank_of_another_is_told_apart() -> None:
    source, *_ = PMI
    inner = [sys.executable, "-c", LAUNCHER, "PMI_RANK", "PMI_SIZE", sys.executable, "-c", SHOW.format(source=source)]
    outer = {**os.environ, "PMI_RANK": "1", "PMI_SIZE": "7"}
    run = subprocess.run(inner, stdout=subprocess.PIPE, text=True, check=True, timeout=60, env=outer)
    first, second = run.stdout.split()
    assert first == second
