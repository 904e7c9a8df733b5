"""Who is compared: gradsync over a backend, and PyTorch and mpi4py where this Python has them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from gradsync.bench.crew import Crew, Patience, Start
from gradsync.bench.rank_starts import by_themselves, find_mpiexec, under_gradsync, under_mpiexec, without_launcher
from gradsync.errors import BackendUnavailable

GRADSYNC, TORCH, MPI4PY = "gradsync", "torch", "mpi4py"
_RANK = "gradsync.bench.collectives.rank"
_PATIENCE = Patience(start_seconds=60.0, answer_seconds=300.0)


@dataclass(frozen=True)
class Contender:
    """A system that takes part.

    Attributes:
        name: its ranks' argument: "gradsync/shm", "torch/gloo", "mpi4py".
    """

    name: str

    def starts(self, address: str, ranks: int) -> list[Start]:
        """Returns the processes to start.

        Raises:
            BackendUnavailable: there is no mpiexec.
        """
        arguments = [_RANK, self.name, address]
        system, _, backend = self.name.partition("/")
        if system == TORCH:
            # Left alone, gloo looks for the interface of the host's name.
            variables = {"GLOO_SOCKET_IFNAME": "lo", "INIT_METHOD": f"file://{address}.init"}
            return by_themselves(ranks, arguments, variables)
        if system == MPI4PY or backend == "mpi":
            mpiexec = find_mpiexec()
            if mpiexec is None:
                raise BackendUnavailable(f"{self.name} needs mpiexec, found none: pip install mpich, or load your MPI")
            return under_mpiexec(mpiexec, ranks, arguments)
        return under_gradsync(ranks, arguments)


def start(contender: Contender, folder: str, ranks: int, patience: Patience = _PATIENCE) -> Crew:
    """Starts the ranks of a contender.

    Raises:
        CrewFailed: they did not start.
    """

    def starts(address: str) -> Sequence[Start]:
        return contender.starts(address, ranks)

    return Crew(contender.name, folder, starts, ranks, environ=without_launcher(), patience=patience)


def contenders(backend: str, *, compares: bool) -> tuple[list[Contender], dict[str, str]]:
    """Returns who takes part, gradsync first, and who does not and why.

    Args:
        backend: gradsync's.
        compares: whether others are asked for.
    """
    present, absent = [Contender(f"{GRADSYNC}/{backend}")], {}
    if compares:
        torch = f"{TORCH}/{'nccl' if backend == 'nccl' else 'gloo'}"
        reasons = {torch: _why_no_torch(), MPI4PY: _why_no_mpi4py(backend)}
        present += [Contender(name) for name, reason in reasons.items() if not reason]
        absent = {name: reason for name, reason in reasons.items() if reason}
    return present, absent


def _why_no_torch() -> str:
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed in this Python: pip install torch"
    return ""


def _why_no_mpi4py(backend: str) -> str:
    if backend == "nccl":
        return "mpi4py is timed on host arrays, beside backends of the CPU"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed in this Python: pip install mpi4py mpich"
    return "" if find_mpiexec() else "there is no mpiexec on the PATH: pip install mpich, or load your MPI"
