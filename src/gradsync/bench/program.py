"""Runs a measurement on all ranks, which either a launcher or this command has started.

`gradsync bench ...` starts ranks on this machine: with gradsync's launcher, or with mpiexec for backend "mpi". A
launcher may also start the command as one rank of a job, for example `mpiexec -n 4 gradsync bench ...`. Then the
command starts no ranks, and the ranks of this job measure together. Such a launcher is mpiexec, srun, torchrun or
`gradsync run`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

import gradsync as gs
from gradsync.backends import TABLE
from gradsync.communicators.communicator import Communicator
from gradsync.environment import find_mpiexec, read_environment, without_launcher
from gradsync.errors import BackendUnavailable, GradsyncError, InvalidArgument, RankFailed
from gradsync.launching.launcher import launcher
from gradsync.machine import blas_thread_variables, count_gpus

_Wanted = TypeVar("_Wanted")
_Result = TypeVar("_Result")

_RANKS_WITHOUT_GPU = 2
# Without these variables Open MPI refuses to run as root (the usual user in a container), and to start more ranks than
# there are cores.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def array_module(communicator: Communicator) -> tuple[Any, Callable[[], None]]:
    """Returns the array module of the communicator, NumPy or CuPy, and a function that waits for the device."""
    if communicator.device == "cpu":
        return np, lambda: None
    import cupy

    cupy.cuda.Device(int(communicator.device.partition(":")[2] or 0)).use()
    return cupy, lambda: cupy.cuda.get_current_stream().synchronize()


def count_ranks(nprocs: int | None, backend: str) -> int:
    """Returns the number of ranks that a launcher has started; without a launcher, the number of ranks to start.

    Raises:
        InvalidArgument: the option -n does not fit the backend, or differs from the launcher's number of ranks; or,
            without -n, the launcher's environment variables are wrong.
        BackendUnavailable: the backend cannot run here.
    """
    if (launched := _launched_ranks(nprocs)) is not None:
        return launched
    row = TABLE.get(backend)  # None for "auto"
    if row is None:
        return nprocs or (count_gpus() if count_gpus() > 1 else _RANKS_WITHOUT_GPU)
    ranks = nprocs or (1 if row.single_rank else count_gpus() if row.on_gpus else _RANKS_WITHOUT_GPU)
    if row.on_gpus and count_gpus() == 0:
        raise BackendUnavailable(f"backend {backend!r} cannot run here: no GPU is visible; use 'shm' on one host")
    if row.under_mpiexec and find_mpiexec() is None:
        raise BackendUnavailable(f"backend {backend!r} needs mpiexec on the PATH: pip install mpi4py mpich")
    if row.single_rank and ranks != 1:
        raise InvalidArgument(f"backend {backend!r} runs one rank only, got -n {ranks}")
    return ranks


def run_as_ranks(
    program: Callable[[_Wanted], _Result], wanted: _Wanted, *, nprocs: int | None, backend: str
) -> _Result | None:
    """Calls `program(wanted)` on all ranks, in an initialised process group, and returns rank 0's result.

    Args:
        program: a function at the top level of a module, because gradsync pickles it.
        wanted: the settings of the measurement; gradsync pickles the settings too.
        nprocs, backend: the options --nprocs and --backend of the command.

    Returns:
        Rank 0's result. None if a different process prints the result, because this process is not rank 0, or because
        this process has started the ranks with mpiexec.

    Raises:
        InvalidArgument, BackendUnavailable: see count_ranks.
        GradsyncError: a rank that this command started failed; its traceback is on stderr.
    """
    if _launched_ranks(nprocs) is not None:
        with gs.init_process_group(backend) as comm:
            result = program(wanted)
            return result if comm.rank == 0 else None
    ranks = count_ranks(nprocs, backend)
    # Environment variables of an earlier launcher would give the new ranks a wrong rank and world size.
    for name in set(os.environ) - set(without_launcher()):
        del os.environ[name]
    if backend in TABLE and TABLE[backend].under_mpiexec:
        _run_under_mpiexec(ranks)
        return None
    try:
        return launcher(program, n_gpus=ranks, backend=backend)(wanted)[0]
    except RankFailed as error:
        # The command shows errors on one line, without a traceback.
        print(error.traceback_text, file=sys.stderr)
        raise GradsyncError(str(error).partition("\n")[0]) from None


def _launched_ranks(nprocs: int | None) -> int | None:
    """Returns the world size if a launcher has started this process as a rank; else None.

    Raises:
        InvalidArgument: the launcher has started a different number of ranks than the option -n requests; or, without
            -n, the launcher's environment variables are wrong.
    """
    try:
        place = read_environment()
    except InvalidArgument:
        if nprocs is None:
            raise
        return None  # the variables may come from an ended job; because of -n this command starts the ranks itself
    launched = None if place is None else place.world_size
    if nprocs is not None and launched not in (None, nprocs):
        raise InvalidArgument(
            f"-n asks for {nprocs} ranks, but a launcher's environment variables say that this process is one of "
            f"{launched} ranks: leave out -n under a launcher; otherwise unset RANK, WORLD_SIZE and the launcher's own "
            "variables"
        )
    return launched


def _run_under_mpiexec(ranks: int) -> None:
    """Runs this command again under mpiexec, with `ranks` ranks."""
    environ = os.environ | blas_thread_variables(ranks) | _OPEN_MPI
    command = [str(find_mpiexec()), "-n", str(ranks), sys.executable, "-m", "gradsync", *sys.argv[1:]]
    sys.stdout.flush()
    done = subprocess.run(command, env=environ, check=False)
    if done.returncode:
        raise GradsyncError(f"{command[0]} ended with exit code {done.returncode}: see its messages above")
