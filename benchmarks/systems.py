"""The systems that take part: how they are started, and what a step needs of them."""

from __future__ import annotations

import functools
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

import gradsync as gs

Step = Callable[[], Any]  # what is timed; one that returns a float has timed itself: only these seconds count


class Absent(Exception):
    """A contender cannot take part here; the text says what to do about it."""


NO_TORCH = "PyTorch is not installed: pip install torch --index-url https://download.pytorch.org/whl/cpu"
NO_MPI = "mpi4py or its MPI is not installed: pip install mpi4py mpich"
# One team for each; a contender of another name is gradsync's.
SYSTEMS = {"gloo": "torch", "DDP": "torch", "mpi4py": "mpi"}
VARIABLES = {
    # A thread for each rank, as gradsync's launcher and torchrun have it.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Open MPI refuses to run as root, the usual user of a container, and to start more ranks than cores.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def launcher_of(system: str, ranks: int) -> list[str]:
    """Returns the command that starts ranks of a system, without the program.

    Raises:
        Absent: the system is not installed.
    """
    if system == "mpi":
        mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        if mpiexec is None or importlib.util.find_spec("mpi4py") is None:
            raise Absent(NO_MPI)
        return [mpiexec, "-n", str(ranks), sys.executable]
    if system == "torch" and importlib.util.find_spec("torch") is None:
        raise Absent(NO_TORCH)
    return [sys.executable, "-m", "gradsync", "run", "--no-prefix", "-n", str(ranks)]


@contextmanager
def started(command: Sequence[str], *, deadline_seconds: float = 60, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Yields the process of a command, which is killed at the end or the deadline, with all processes of its group."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, **options)

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(deadline_seconds, kill)
    timer.start()
    with process:
        try:
            yield process
        finally:
            timer.cancel()
            kill()


@contextmanager
def rendezvous_server(world_size: int) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Yields the process of `gradsync serve`, its address, and the run's secret as hex digits."""
    secret = secrets.token_hex(32)
    command = [sys.executable, "-m", "gradsync", "serve", "--world-size", str(world_size), "--secret-file", "-"]
    with started(command, stdin=subprocess.PIPE) as server:
        server.stdin.write(f"{secret}\n")
        server.stdin.flush()
        yield server, server.stdout.readline().strip(), secret


# -- On a rank --------------------------------------------------------------------------------------------------------


@functools.cache
def comm() -> gs.Communicator:
    """The communicator of all ranks. It waits as long as somebody else's turn takes."""
    made = gs.init_process_group(collective_timeout_seconds=24 * 3600)
    made.broadcast(np.zeros(1))  # as in a loop: else a callback says that nothing was broadcast
    return made


@functools.cache
def gloo() -> Any:
    """PyTorch's `torch.distributed`, over gloo, with one thread for PyTorch's own operators."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        raise Absent(NO_TORCH) from None
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo looks for the interface of the host's name
    rank, size = comm().rank, comm().world_size
    store = dist.TCPStore("127.0.0.1", 0, size, True, wait_for_workers=False) if rank == 0 else None
    port = comm().objects.broadcast(store.port if store else None, root=0)
    store = store or dist.TCPStore("127.0.0.1", port, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return dist


@functools.cache
def mpi() -> Any:
    """mpi4py's `MPI`."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # RuntimeError: there is mpi4py, and no MPI
        raise Absent(NO_MPI) from None
    if MPI.COMM_WORLD.size != comm().world_size:
        raise Absent("this job was not started by MPI: mpiexec -n 2 python -m pytest benchmarks/")
    return MPI
