"""This process in its MPI job: how MPI is loaded, who we are there, where the ranks meet, and how a failed job ends.

Importing mpi4py.MPI initialises MPI, which only a program that uses it should pay for: this file imports it in
`load_mpi` alone.

The ranks of a job need no address to meet: they share short texts over MPI before they have met. What MPI carries is
not encrypted, and neither is the run's secret on this way: whoever can read the network of an MPI job can read its
gradients too.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gradsync.environment import RankEnvironment
from gradsync.errors import BackendUnavailable, MpiError, RendezvousTimeout, uncaught_error

if TYPE_CHECKING:
    from gradsync.rendezvous.hosting import Share

_INSTALL = "run `pip install mpi4py` where your cluster's MPI is loaded; for one machine `pip install mpi4py mpich`"
_TEXT_BYTES = 512  # room for an address and a secret made for the meeting, or for some addresses
_LOOK_EVERY_SECONDS = 1e-3
_EXIT_CODE_INTERRUPTED = 130

_is_parents = False  # MPI was initialised by the process that this one was forked from
_share_comm: Any = None  # apart from what the program does on MPI_COMM_WORLD; lasts as long as MPI
_unfinished: list[object] = []
_log = logging.getLogger("gradsync")


# -- Loading -------------------------------------------------------------------------------------------------------


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


def to_mpi_error(error: Any, label: str) -> MpiError:
    """Returns an exception of mpi4py as MpiError."""
    return MpiError(f"{label}: MPI reported {error.Get_error_string().strip()}", code=int(error.Get_error_class()))


# -- Ranks ---------------------------------------------------------------------------------------------------------


def check_place(mpi: Any, rank: int, world_size: int) -> None:
    """Makes sure that the ranks of the run are those of MPI_COMM_WORLD, by number.

    Raises:
        BackendUnavailable: they are not; the text says why, as far as that can be known.
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


def mpi_place() -> RankEnvironment | None:
    """Returns this process's place as MPI has it, where no launcher has left it in the environment.

    Raises:
        BackendUnavailable: there is no mpi4py.
    """
    mpi = load_mpi()
    world = mpi.COMM_WORLD
    if world.Get_size() == 1:
        return None  # not started by mpiexec
    local = world.Split_type(mpi.COMM_TYPE_SHARED)
    try:
        local_rank, local_world_size = local.Get_rank(), local.Get_size()
    finally:
        local.Free()
    return RankEnvironment(world.Get_rank(), world.Get_size(), local_rank, local_world_size, source="MPI")


# -- Meeting -------------------------------------------------------------------------------------------------------


def share_over_mpi(place: RankEnvironment) -> Share | None:
    """Returns a function that gives every rank a short text of each; None where MPI has other ranks than the run.

    Initialises MPI. Every rank must call that function, in the same order; it raises RendezvousTimeout where a rank
    does not come.
    """
    try:
        check_place(load_mpi(), place.rank, place.world_size)
    except BackendUnavailable:
        return None
    return partial(_share, place)


def _share(place: RankEnvironment, text: bytes, deadline: float) -> list[bytes]:
    global _share_comm
    if _share_comm is None:
        made, request = load_mpi().COMM_WORLD.Idup()
        _finish(request, place, deadline)
        _share_comm = made
    row = np.frombuffer(text.ljust(_TEXT_BYTES, b"\0"), np.uint8).copy()
    rows = np.zeros((place.world_size, _TEXT_BYTES), np.uint8)
    _finish(_share_comm.Iallgather(row, rows), place, deadline, row, rows)
    return [found.tobytes().rstrip(b"\0") for found in rows]


def _finish(request: Any, place: RankEnvironment, deadline: float, *memory: object) -> None:
    mpi = loaded_mpi()
    try:
        while not request.Test():
            if time.monotonic() > deadline:
                raise RendezvousTimeout(
                    f"rank {place.rank}/{place.world_size}: not all ranks of the MPI job came to init_process_group "
                    "before the deadline"
                )
            time.sleep(_LOOK_EVERY_SECONDS)
    except BaseException as error:  # Ctrl-C too: MPI goes on
        keep_for_ever(request, memory)
        if isinstance(error, mpi.Exception):
            raise to_mpi_error(error, f"rank {place.rank}/{place.world_size}") from error
        raise


# -- Ending --------------------------------------------------------------------------------------------------------
# A collective of MPI cannot be taken back: its memory must stay until the process ends. And MPI_Finalize, which mpi4py
# calls at the very end, waits for all ranks: a process that has failed must end the job instead, or it would hang
# there.


def keep_for_ever(*kept: object) -> None:
    """Keeps requests that have not ended, and the memory that MPI may still read and write."""
    _unfinished.append(kept)


def has_job_failed() -> bool:
    """Whether this process, about to exit, has to end a job of MPI: it exits because of an exception, or has abandoned
    collectives on which MPI still works.
    """
    mpi = loaded_mpi()
    return mpi is not None and mpi.COMM_WORLD.Get_size() > 1 and (uncaught_error() is not None or bool(_unfinished))


def end_job() -> None:
    """Ends the whole job, which has failed, by MPI_Abort. For the very end: the traceback has been printed."""
    if uncaught_error() is None:  # the exception that ended the wait was caught
        _log.error("this MPI job ends with an error: a collective was given up, which MPI cannot take back")
    _flush()
    loaded_mpi().COMM_WORLD.Abort(_exit_code())


def end_forked_child() -> None:
    """Ends the child of a fork that is about to exit because of an exception; MPI_Finalize would wait for all ranks."""
    if _is_parents and uncaught_error() is not None:
        _flush()
        os._exit(_exit_code())


def _exit_code() -> int:
    return _EXIT_CODE_INTERRUPTED if isinstance(uncaught_error(), KeyboardInterrupt) else 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # None, closed, or a pipe that nobody reads: the end must not fail
            stream.flush()


def _forget_after_fork() -> None:
    """The child of a fork is no rank; what it did over MPI would be done in its parent's name, up to ending the job."""
    global _is_parents
    _is_parents = _is_parents or loaded_mpi() is not None


os.register_at_fork(after_in_child=_forget_after_fork)
