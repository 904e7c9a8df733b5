"""The table of backends, for the command line, the checks of arguments and `gradsync doctor`.

Each has one row here, and one module, with the functions of `BackendModule` in backend_choice.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class BackendRow(NamedTuple):
    """The row of one backend.

    Attributes:
        module: its module, imported only where it is used, so that ranks start fast.
        on_gpus: whether each rank needs a GPU, which several may share only with allow_shared_gpu.
        under_mpiexec: whether mpiexec or srun must start the ranks.
        single_rank: whether it is for a world of one rank only.
        doctor_lines: the lines of `gradsync doctor` that it depends on: if one says "not usable here", it is not tried.
    """

    module: str
    on_gpus: bool = False
    under_mpiexec: bool = False
    single_rank: bool = False
    doctor_lines: tuple[str, ...] = ()


#: By name, in the order in which `gradsync doctor` tries them.
TABLE = {
    "local": BackendRow("gradsync.communicators.local", single_rank=True),
    "shm": BackendRow("gradsync.communicators.shared_memory.backend", doctor_lines=("kernels",)),
    "mpi": BackendRow("gradsync.communicators.mpi.backend", under_mpiexec=True, doctor_lines=("MPI",)),
    "nccl": BackendRow("gradsync.communicators.nccl.connect", on_gpus=True, doctor_lines=("GPUs", "CuPy", "NCCL")),
}
#: What users may pass as a backend. "auto" is none: one is chosen for all ranks.
BACKENDS = ("auto", *TABLE)


def unknown_backend(name: object, where: str = "", known: Sequence[str] = BACKENDS) -> str:
    """Returns the error for a name that is not known; `where` is text such as " in GRADSYNC_BACKEND"."""
    text = f"unknown backend {name!r}{where}: use one of {', '.join(known)}"
    return f"{text}; in place of gloo, shm on one machine, and mpi on several" if name == "gloo" else text
