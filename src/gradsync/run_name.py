"""A name for a run on one machine whose launcher tells its ranks who they are, and not where to meet.

Ranks that find the same name meet through a file of that name (`meeting_file.py`). A Slurm step has a number. The
launchers of MPI leave nothing in the environment that is common to all of them; but all ranks of a machine descend
from one process, the launcher or its daemon there, which is told by its number and the time of its start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from gradsync.launcher_variables import MPI_LAUNCHERS, SLURM
from gradsync.machine import read_stat


def name_run(environ: Mapping[str, str], source: str) -> str | None:
    """Gives a name that all ranks of this run on this machine find, and no other run at the same time.

    Args:
        environ: the variables.
        source: who started the ranks, as `Place.source`.

    Returns:
        The name, fit for a file's; None where there is none: started by hand, or each rank in a container of its own.
    """
    if source == SLURM:
        from gradsync.slurm_variables import step_name

        return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in step_name(environ))
    names = [name for launcher in MPI_LAUNCHERS if launcher.name == source for name in launcher.set_in(environ)]
    if not names:
        return None
    found = _launcher_process({f"{name}={environ[name]}".encode() for name in names})
    return None if found is None else f"{source.replace(' ', '')}-{found[0]}-{found[1]}"


def _launcher_process(own: set[bytes]) -> tuple[int, str] | None:
    """Gives number and start time of the closest ancestor that is no rank: between them there may be shells.

    Args:
        own: variables of this rank, which what a rank runs inherits.
    """
    process = read_stat(os.getpid())
    while process is not None and process.parent > 0:
        pid = process.parent
        process = read_stat(pid)
        if not own <= _variables_of(pid):
            return pid, "0" if process is None else process.start_time
    return None


def _variables_of(pid: int) -> set[bytes]:
    """Reads the variables that a process was started with; none where it belongs to somebody else."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return set(file.read().split(b"\0"))
    except OSError:
        return set()
