"""MPI: mpi4py, the library that it has found, and the mpiexec that belongs to it."""

from __future__ import annotations

from typing import Any

from gradsync.doctor.finding import Finding, ok, unusable, warning
from gradsync.doctor.surroundings import Surroundings

_INSTALL = "on one machine: pip install mpi4py mpich; on a cluster: load its MPI, then pip install mpi4py"
_MARKS = {"Open MPI": ("open mpi", "openrte", "prte", "open-mpi"), "MPICH": ("hydra", "mpich"), "Intel": ("intel",)}


def check_mpi(here: Surroundings) -> list[Finding]:
    """Whether ranks can be started and joined over MPI."""
    if here.package("mpi4py") is None and here.answers.get("mpi", {}).get("version") is None:
        return [unusable("MPI", "mpi4py is not installed: only the backend mpi needs it", _INSTALL)]
    answer = here.answers.get("mpi", {"error": "it was not asked"})
    if "error" in answer:
        return [unusable("MPI", f"mpi4py is installed, but does not load: {_first_line(answer)}", _INSTALL)]
    loaded = f"mpi4py {answer['version']} over {answer['library']}"
    if here.mpiexec is None:
        advice = "put that MPI's bin folder on the PATH (module load ...), or: pip install mpich"
        return [unusable("MPI", f"{loaded}, but there is no mpiexec to start ranks with", advice)]
    theirs, ours = _vendor(here.answers.get("mpiexec", {}).get("text", "")), _vendor(answer["library"])
    if theirs and ours and theirs != ours and {theirs, ours} != {"MPICH", "Intel"}:
        text = f"{loaded}, but {here.mpiexec} is that of {theirs}: each rank would believe to be alone"
        return [warning("MPI", text, f"use the mpiexec of {ours}: put its bin folder first on the PATH")]
    return [ok("MPI", f"{loaded}; {here.mpiexec}")]


def _first_line(answer: Any) -> str:
    return str(answer["error"]).strip().splitlines()[0][:200]


def _vendor(text: str) -> str:
    """Returns whose MPI a text speaks of; "" where it does not tell."""
    lower = text.lower()
    if "intel" in lower:
        return "Intel"
    return next((vendor for vendor, marks in _MARKS.items() if any(mark in lower for mark in marks)), "")
