"""A process of an MPI job: load MPI, find the rank, share the server's address, end a failed job.

Importing mpi4py.MPI initialises MPI, which takes time, so only `load_mpi` does.

Nobody need set the rendezvous server's address: rank 0 sends it to the others over MPI, with the run's secret. MPI does
not encrypt: who can read the secret there can read the gradients as well.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gradsync.errors import (
    BackendUnavailable,
    GradsyncError,
    MpiError,
    RendezvousTimeout,
    name_ranks,
    uncaught_error,
)
from gradsync.launchers import CONNECT_SRUN, RankEnvironment, is_task_of_srun
from gradsync.reduction import Array

if TYPE_CHECKING:
    from gradsync.rendezvous.hosting import Ask

_INSTALL = "run `pip install mpi4py` where your cluster's MPI is loaded; for one machine `pip install mpi4py mpich`"
_ROW_BYTES = 1024
_YES, _NO, _MISSING = "+", "-", "?"  # how rank 0's answers begin; _YES: each rank's text, which is else a row of zeros
_VERDICT_SECONDS = 2.0  # how much longer than rank 0 the others wait: it tells them who is missing
_TEST_EVERY_SECONDS = 1e-3
_EXIT_CODE_INTERRUPTED = 130

TAG_OF_GOODBYE = 4  # beside the tags of requests.py

_is_parents = False  # whether the parent of this forked process has initialised MPI
_unfinished: list[object] = []
_at_finalize: list[Callable[[], None]] = []
_finalize_key: int | None = None
_closing: deque[tuple[list[Any], Any]] = (
    deque()
)  # communicators that this rank has closed, and the other ranks' goodbyes
_log = logging.getLogger("gradsync")


# -- Loading -------------------------------------------------------------------------------------------------------


def load_mpi() -> Any:
    """Returns the module mpi4py.MPI, initialised.

    Raises:
        BackendUnavailable: mpi4py or MPI's library is missing, MPI was initialised without MPI_THREAD_MULTIPLE or has
            been finalised, or the parent of this forked process had initialised it.
    """
    if _is_parents:
        raise BackendUnavailable("this process was forked from an MPI rank, and only the parent can use MPI")
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise BackendUnavailable(f"mpi4py cannot be imported ({error}): {_INSTALL}") from error
    except RuntimeError as error:  # mpi4py loads MPI's library when it is imported
        raise BackendUnavailable(f"mpi4py could not load an MPI library ({error}): {_INSTALL}") from error
    if MPI.Is_finalized():
        raise BackendUnavailable("MPI has been finalised in this process and cannot be used again")
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise BackendUnavailable(
            "backend 'mpi' needs MPI_THREAD_MULTIPLE, but MPI was initialised with a lower thread level: do not change "
            "mpi4py.rc.thread_level, and let mpi4py initialise MPI"
        )
    return MPI


def loaded_mpi() -> Any:
    """Returns mpi4py.MPI if this process has initialised MPI and not finalised it, else None. Imports nothing."""
    module = sys.modules.get("mpi4py.MPI")
    if _is_parents or module is None or not hasattr(module, "Is_initialized"):  # an empty module of a test suite
        return None
    return module if module.Is_initialized() and not module.Is_finalized() else None


def to_mpi_error(error: Any, label: str) -> MpiError:
    """Converts an exception of mpi4py to MpiError."""
    return MpiError(f"{label}: MPI reported {error.Get_error_string().strip()}", code=int(error.Get_error_class()))


# -- Ranks ---------------------------------------------------------------------------------------------------------


def check_place(mpi: Any, rank: int, world_size: int) -> None:
    """Checks that this process has the same rank and world size in gradsync and in MPI_COMM_WORLD.

    Raises:
        BackendUnavailable: it has not; the message has the likely reason.
    """
    found = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    if found == (rank, world_size):
        return
    vendor = mpi.Get_library_version().partition("\n")[0].strip(" \0")
    if found == (0, 1):
        start = CONNECT_SRUN if is_task_of_srun() else "start the ranks with mpiexec or srun of this MPI"
        raise BackendUnavailable(
            f"rank {rank}/{world_size} is alone in MPI_COMM_WORLD: {start}; mpi4py has loaded {vendor}"
        )
    raise BackendUnavailable(
        f"rank {rank}/{world_size} is rank {found[0]} of {found[1]} in MPI_COMM_WORLD: backend 'mpi' needs exactly the "
        "ranks that mpiexec or srun has started, in the same order"
    )


def mpi_place() -> RankEnvironment | None:
    """Returns this process's rank and world size in MPI_COMM_WORLD; None if MPI_COMM_WORLD has only one rank.

    Raises:
        BackendUnavailable: this process cannot use MPI; see load_mpi.
    """
    mpi = load_mpi()
    world = mpi.COMM_WORLD
    if world.Get_size() == 1:
        return None  # mpiexec has not started it, or nothing else
    local = world.Split_type(mpi.COMM_TYPE_SHARED)
    try:
        local_rank, local_world_size = local.Get_rank(), local.Get_size()
    finally:
        local.Free()
    return RankEnvironment(world.Get_rank(), world.Get_size(), local_rank, local_world_size, source="MPI")


# -- The rendezvous' address ---------------------------------------------------------------------------------------


def ask_in_world(place: RankEnvironment) -> Ask | None:
    """Returns `ask_rank_0` among MPI's ranks; None if this process cannot use MPI, or they are not those of the run.

    It initialises MPI.
    """
    try:
        mpi = load_mpi()
        check_place(mpi, place.rank, place.world_size)
    except BackendUnavailable:
        return None
    return partial(ask_rank_0, mpi, mpi.COMM_WORLD, "init_process_group", f"rank {place.rank}/{place.world_size}")


def duplicate(comm: Any, label: str, deadline: float) -> Any:
    """Returns a duplicate of a communicator. All its ranks must call this.

    Raises:
        RendezvousTimeout: a rank did not call this before the deadline.
    """
    made, request = comm.Idup()
    if not _finish(request, label, deadline):
        raise RendezvousTimeout(f"{label}: not all ranks of the MPI job duplicated a communicator before the deadline")
    return made


def ask_rank_0(
    mpi: Any,
    comm: Any,
    what: str,
    label: str,
    text: str,
    answer: Callable[[list[str]], list[str]],
    deadline: float,
) -> str:
    """Sends a short text to rank 0, which answers each rank with a text; returns this rank's answer.

    Args:
        mpi, comm: mpi4py.MPI, and the communicator, all of whose ranks must call this.
        what, label: the public function, and this rank, in errors.
        text: at most 1,000 bytes.
        answer: what rank 0 does with the texts of all ranks. If it raises a GradsyncError, all ranks do.
        deadline: in monotonic seconds.

    Raises:
        RendezvousTimeout: a rank did not call this in time; it is named on all.
        BackendUnavailable: the answer failed.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    row, rows = _row(_YES + text), np.zeros((size if rank == 0 else 0, _ROW_BYTES), np.uint8)
    parts = [_ROW_BYTES] * size, [_ROW_BYTES * each for each in range(size)]
    # MPI sends these directly to rank 0, and from it: where a rank is missing, only its row is.
    gathered = comm.Igatherv([row, mpi.BYTE], [rows, parts, mpi.BYTE] if rank == 0 else None, 0)
    has_all = _finish(gathered, label, deadline, row, rows)
    if rank == 0:
        if has_all:
            try:
                answers = [_YES + each for each in answer([_text(each)[1:] for each in rows])]
            except GradsyncError as error:
                answers = [f"{_NO}{error}"] * size
        else:
            missing = [number for number in range(1, size) if not rows[number, 0]]
            answers = [_MISSING + ",".join(map(str, missing))[: _ROW_BYTES - 2]] * size
            deadline = time.monotonic() + _VERDICT_SECONDS
        rows = np.stack([_row(each) for each in answers])
    scattered = comm.Iscatterv([rows, parts, mpi.BYTE] if rank == 0 else None, [row, mpi.BYTE], 0)
    if not _finish(scattered, label, deadline + (_VERDICT_SECONDS if rank else 0.0), row, rows) and rank:
        raise RendezvousTimeout(f"{label}: {what}: rank 0 has not called it before the deadline", missing_ranks=(0,))
    reply = answers[0] if rank == 0 else _text(row)
    if reply.startswith(_MISSING):
        ranks = tuple(int(each) for each in reply[1:].split(",") if each)
        raise RendezvousTimeout(
            f"{label}: {what} waited until its deadline for {name_ranks(ranks)}: all ranks of the MPI communicator "
            "must call it",
            missing_ranks=ranks,
        )
    if reply.startswith(_NO):
        raise BackendUnavailable(reply[1:])
    return reply[1:]


def _row(text: str) -> Array:
    return np.frombuffer(text.encode()[:_ROW_BYTES].ljust(_ROW_BYTES, b"\0"), np.uint8).copy()


def _text(row: Array) -> str:
    return row.tobytes().rstrip(b"\0").decode(errors="replace")


def _finish(request: Any, label: str, deadline: float, *memory: object) -> bool:
    """Waits for a request; returns whether it ended before the deadline. If not, its memory is kept for ever."""
    mpi, began = loaded_mpi(), time.monotonic()
    try:
        while not request.Test():
            now = time.monotonic()
            if now > deadline:
                keep_for_ever(request, memory)
                return False
            time.sleep(min(_TEST_EVERY_SECONDS, (now - began) / 8))
        return True
    except BaseException as error:  # Ctrl-C too: MPI still uses the memory
        keep_for_ever(request, memory)
        if isinstance(error, mpi.Exception):
            raise to_mpi_error(error, label) from error
        raise


def free_with_others(comm: Any) -> None:
    """Frees a communicator once all its ranks have called this; MPI_Finalize frees those of which some have not.

    MPI_Comm_free is collective, and a rank that closes a communicator does not wait for the others. So it tells them by
    an empty message, and looks again when it closes the next one. (Not by MPI_Ibarrier: a rank may still begin a
    collective, which would take that for its own.) Without this, MPICH has room for some 2,000 communicators in a run.
    """
    mpi = loaded_mpi()
    if mpi is None:  # finalised
        return
    others, nothing = [rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()], np.empty(0, np.uint8)
    goodbyes = [call(nothing, rank, TAG_OF_GOODBYE) for rank in others for call in (comm.Irecv, comm.Isend)]
    _closing.append((goodbyes, comm))
    for _ in range(len(_closing)):
        with suppress(IndexError):  # another thread has it
            goodbyes, closed = _closing.popleft()
            if mpi.Request.Testall(goodbyes):
                closed.Free()
            else:
                _closing.append((goodbyes, closed))


def before_finalize(function: Callable[[], None]) -> None:
    """Has a function called when the program calls MPI.Finalize(), while MPI can still be used."""
    global _finalize_key
    mpi = loaded_mpi()
    if mpi is None:
        return
    _at_finalize.append(function)
    if _finalize_key is None:
        # MPI_Finalize first deletes what MPI_COMM_SELF holds. Source: MPI 4.0, section 11.2.4.
        _finalize_key = mpi.Comm.Create_keyval(delete_fn=lambda *_: _call_all())
        mpi.COMM_SELF.Set_attr(_finalize_key, _at_finalize)


def _call_all() -> None:
    while _at_finalize:
        _at_finalize.pop(0)()


# -- Ending --------------------------------------------------------------------------------------------------------
# A collective of MPI cannot be cancelled, so its memory must stay until the process ends. MPI_Finalize, which mpi4py
# calls at exit, waits for all ranks, so a failed process must end the job before.


def keep_for_ever(*kept: object) -> None:
    """Keeps requests that have not ended, and their memory, which MPI may still read and write."""
    _unfinished.append(kept)


def has_job_failed() -> bool:
    """Whether this process must end its MPI job at exit: after an exception, or an unfinished collective."""
    mpi = loaded_mpi()
    return mpi is not None and mpi.COMM_WORLD.Get_size() > 1 and (uncaught_error() is not None or bool(_unfinished))


def end_job() -> None:
    """Ends the whole failed job by MPI_Abort: at exit, after Python has printed the traceback."""
    if uncaught_error() is None:  # the program has caught the exception that ended the wait
        _log.error(
            "this MPI job ends with an error: a wait for a collective failed, and MPI cannot cancel the collective"
        )
    _flush()
    loaded_mpi().COMM_WORLD.Abort(_exit_code())


def end_forked_child() -> None:
    """Ends a forked child that an exception ends; otherwise MPI_Finalize would wait for all ranks."""
    if _is_parents and uncaught_error() is not None:
        _flush()
        os._exit(_exit_code())


def _exit_code() -> int:
    return _EXIT_CODE_INTERRUPTED if isinstance(uncaught_error(), KeyboardInterrupt) else 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the stream may be None, closed or a broken pipe
            stream.flush()


def _forget_after_fork() -> None:
    """Notes in a forked child that MPI is the parent's: the child is no rank, and must not end the job."""
    global _is_parents
    _is_parents = _is_parents or loaded_mpi() is not None


os.register_at_fork(after_in_child=_forget_after_fork)
