"""MPI as mpi4py exposes it: loading it, who this process is there, and its errors in our words.

Importing mpi4py.MPI initialises MPI, which only a program that uses it should pay for.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from gradsync.errors import BackendUnavailable, MpiError

_is_parents = False  # MPI was initialised by the process that this one was forked from

_INSTALL = "run `pip install mpi4py` where your cluster's MPI is loaded; for one machine `pip install mpi4py mpich`"


def load_mpi() -> Any:
    """Returns the module mpi4py.MPI, initialised.

    Raises:
        BackendUnavailable: mpi4py or MPI's library is missing, MPI was initialised so that threads may not use it, or
            it is that of the process from which this one was forked.
    """
    if _is_parents:
        raise BackendUnavailable("this process was forked from a rank of MPI, to which alone MPI belongs")
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise BackendUnavailable(f"mpi4py cannot be imported ({error}): {_INSTALL}") from error
    except RuntimeError as error:  # mpi4py finds its library only when it is imported
        raise BackendUnavailable(f"mpi4py finds no library of MPI ({error}): {_INSTALL}") from error
    if MPI.Is_finalized():
        raise BackendUnavailable("MPI has been finalised in this process; it cannot be used again")
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise BackendUnavailable(
            "MPI was initialised without MPI_THREAD_MULTIPLE, which collectives on several threads need: leave "
            "mpi4py.rc.thread_level as it is, and let mpi4py initialise MPI"
        )
    return MPI


def loaded_mpi() -> Any:
    """Returns mpi4py.MPI if this process has initialised it and not finalised it, else None; imports nothing."""
    module = sys.modules.get("mpi4py.MPI")
    if _is_parents or module is None or not module.Is_initialized() or module.Is_finalized():
        return None
    return module


def is_mpi_of_parent() -> bool:
    """Whether this process was forked from one that had initialised MPI."""
    return _is_parents


def check_place(mpi: Any, rank: int, world_size: int) -> None:
    """Makes sure that the ranks of the run are those of MPI_COMM_WORLD, by number.

    Raises:
        BackendUnavailable: they are not; the text says why, as far as that can be told.
    """
    found = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    if found == (rank, world_size):
        return
    vendor = mpi.Get_library_version().partition("\n")[0].strip(" \0")
    if found == (0, 1):
        raise BackendUnavailable(
            f"rank {rank}/{world_size}: MPI knows of this process only: start the ranks with mpiexec or srun, and with "
            f"the one that belongs to the MPI that mpi4py has loaded ({vendor})"
        )
    raise BackendUnavailable(
        f"rank {rank}/{world_size} is rank {found[0]} of {found[1]} in MPI_COMM_WORLD: backend 'mpi' joins exactly the "
        "ranks that mpiexec or srun has started, with their numbers"
    )


def to_mpi_error(error: Any, label: str) -> MpiError:
    """Returns an exception of mpi4py as ours."""
    return MpiError(f"{label}: MPI reported {error.Get_error_string().strip()}", code=int(error.Get_error_class()))


def _forget_after_fork() -> None:
    """The child of a fork is no rank: what it did there would be done in its parent's name, up to ending the job."""
    global _is_parents
    _is_parents = _is_parents or loaded_mpi() is not None


os.register_at_fork(after_in_child=_forget_after_fork)
