"""The name of a run whose launcher does not tell where to meet: the same for its ranks, another for any other run."""

from __future__ import annotations

import os

import pytest

from gradsync.launchers import name_run
from gradsync.machine import read_stat

PMI = ("PMI", "PMI_RANK", "PMI_SIZE")


@pytest.mark.parametrize("source", ["gradsync", "RANK"])
def test_no_name_where_mpiexec_was_not_there(source: str) -> None:
    assert name_run({"RANK": "0", "WORLD_SIZE": "2"}, source) is None


def test_no_name_where_no_ancestor_is_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose first process is the rank."""
    from gradsync import launchers

    monkeypatch.setattr(launchers, "_variables_of", lambda pid: {b"PMI_RANK=0", b"PMI_SIZE=2"})
    assert name_run({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI") is None


def test_a_hidden_launcher_still_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where /proc shows a user only what is the user's own."""
    from gradsync import launchers

    monkeypatch.setattr(launchers, "read_stat", lambda pid: read_stat(pid) if pid == os.getpid() else None)
    monkeypatch.setattr(launchers, "_variables_of", lambda pid: set())
    assert name_run({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI") == f"PMI-{os.getppid()}-0"


def test_a_slurm_step_is_a_name_fit_for_a_file() -> None:
    environ = {"SLURM_JOB_ID": "47/../11", "SLURM_STEP_ID": "2"}
    assert name_run(environ, "Slurm") == "slurm-47_.._11.2.0"
