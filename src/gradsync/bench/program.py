"""Runs a measurement on all ranks: on the ranks of a launcher, or on ranks that this command starts.

`gradsync bench ...` starts ranks on this machine: with its own launcher, or with mpiexec for backend "mpi". If the
command itself is a rank (mpiexec -n 4 gradsync bench ..., srun, torchrun, gradsync run), it measures with the others.
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
from gradsync.environment import launched_world_size, without_launcher
from gradsync.errors import BackendUnavailable, GradsyncError, InvalidArgument, RankFailed
from gradsync.launcher_variables import find_mpiexec
from gradsync.launching.launcher import launcher
from gradsync.machine import blas_thread_variables, count_gpus

_Wanted = TypeVar("_Wanted")
_Result = TypeVar("_Result")

_RANKS_WITHOUT_GPU = 2
# Open MPI refuses to run as root, the usual user of a container, and to start more ranks than cores.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def array_module(communicator: Communicator) -> tuple[Any, Callable[[], None]]:
    """Returns the module of the communicator's arrays, NumPy or CuPy, and a function that waits for the device."""
    if communicator.device == "cpu":
        return np, lambda: None
    import cupy

    cupy.cuda.Device(int(communicator.device.partition(":")[2] or 0)).use()
    return cupy, lambda: cupy.cuda.get_current_stream().synchronize()


def count_ranks(nprocs: int | None, backend: str) -> int:
    """Returns the number of ranks: the number that a launcher has started, or the number to start here.

    Raises:
        InvalidArgument: the backend, or the launcher, does not allow this number.
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
        raise InvalidArgument(f"backend {backend!r} is for one rank, got -n {ranks}")
    return ranks


def run_as_ranks(
    program: Callable[[_Wanted], _Result], wanted: _Wanted, *, nprocs: int | None, backend: str
) -> _Result | None:
    """Runs a program on all ranks, each in an initialised group, and returns rank 0's result.

    Args:
        program: a function of a module.
        wanted: its argument; pickled.
        nprocs, backend: the options of the command.

    Returns:
        None if another process reports the result: this is not rank 0, or mpiexec has started the ranks.

    Raises:
        GradsyncError: a rank failed; its traceback is on stderr.
    """
    if _launched_ranks(nprocs) is not None:
        with gs.init_process_group(backend) as comm:
            result = program(wanted)
            return result if comm.rank == 0 else None
    ranks = count_ranks(nprocs, backend)
    # The variables of a launcher that this shell has inherited would give the new ranks wrong places.
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
    """Returns how many ranks a launcher has started, this process among them; None if ranks are to be started here.

    Raises:
        InvalidArgument: the launcher has started another number of ranks than -n asks for.
    """
    try:
        launched = launched_world_size()
    except InvalidArgument:
        if nprocs is None:
            raise
        return None  # the variables of an ended job are still set; -n asks for ranks of this machine
    if nprocs is not None and launched not in (None, nprocs):
        raise InvalidArgument(
            f"this process is one of {launched} ranks, by the variables of a launcher, and -n asks for {nprocs}: leave "
            "-n out, or unset RANK, WORLD_SIZE and the launcher's own variables (gradsync doctor names them)"
        )
    return launched


def _run_under_mpiexec(ranks: int) -> None:
    """Starts this command again, as so many ranks under mpiexec."""
    environ = os.environ | blas_thread_variables(ranks) | _OPEN_MPI
    command = [str(find_mpiexec()), "-n", str(ranks), sys.executable, "-m", "gradsync", *sys.argv[1:]]
    sys.stdout.flush()
    done = subprocess.run(command, env=environ, check=False)
    if done.returncode:
        raise GradsyncError(f"{command[0]} ended with exit code {done.returncode}: see above")
