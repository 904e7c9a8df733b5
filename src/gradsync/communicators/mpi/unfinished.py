"""What MPI still works on when a collective was given up, and how a process ends that has such.

A collective of MPI cannot be taken back: its memory must stay until the process ends. And MPI_Finalize, which mpi4py
calls at the very end, waits for all ranks: a process that has failed must end the job instead, or it would hang there.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from gradsync.communicators.mpi.library import is_mpi_of_parent, loaded_mpi
from gradsync.errors import uncaught_error

_EXIT_CODE_INTERRUPTED = 130

_unfinished: list[object] = []
_log = logging.getLogger("gradsync")


def keep_for_ever(requests: Sequence[Any], memory: object) -> None:
    """Keeps requests that have not ended, and the memory that MPI may still read and write."""
    _unfinished.append((requests, memory))


def has_job_failed() -> bool:
    """Whether this process, about to exit, has to end a job of MPI: it exits because of an exception, or has given up
    collectives on which MPI still works.
    """
    mpi = loaded_mpi()
    return mpi is not None and mpi.COMM_WORLD.Get_size() > 1 and (uncaught_error() is not None or bool(_unfinished))


def end_job() -> None:
    """Ends the whole job, which has failed, by MPI_Abort. For the very end: the traceback has been printed."""
    if uncaught_error() is None:  # the exception that gave it up was caught
        _log.error("this MPI job ends with an error: a collective was given up, which MPI cannot take back")
    _flush()
    loaded_mpi().COMM_WORLD.Abort(_exit_code())


def end_forked_child() -> None:
    """Ends the child of a fork that is about to exit because of an exception; MPI_Finalize would wait for all ranks."""
    if is_mpi_of_parent() and uncaught_error() is not None:
        _flush()
        os._exit(_exit_code())


def _exit_code() -> int:
    return _EXIT_CODE_INTERRUPTED if isinstance(uncaught_error(), KeyboardInterrupt) else 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # None, closed, or a pipe that nobody reads: the end must not fail
            stream.flush()
