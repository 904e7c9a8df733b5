"""The table of backends. Every list of their names is made from it: options, checks of arguments, the doctor.

A backend is one module with the functions of `BackendModule` in backend_choice.py, and one row here.
"""

from __future__ import annotations

from typing import NamedTuple


class BackendRow(NamedTuple):
    """A row of the table.

    Attributes:
        module: the name of the backend's module. It is imported when the backend is used, because most processes use
            one backend and should start fast.
        on_gpus: whether its arrays are on GPUs; each rank needs its own.
        under_mpiexec: whether the launcher of MPI must start its ranks.
        single_rank: whether it is for a world of one rank only.
        doctor_lines: the lines of `gradsync doctor` that must not be "unusable" for the backend to work.
    """

    module: str
    on_gpus: bool = False
    under_mpiexec: bool = False
    single_rank: bool = False
    doctor_lines: tuple[str, ...] = ()


#: The backends by name, in the order in which `gradsync doctor` tries them.
TABLE = {
    "local": BackendRow("gradsync.communicators.local", single_rank=True),
    "shm": BackendRow("gradsync.communicators.shared_memory.shm_backend", doctor_lines=("Python",)),
    "mpi": BackendRow("gradsync.communicators.mpi.mpi_backend", under_mpiexec=True, doctor_lines=("MPI",)),
    "nccl": BackendRow("gradsync.communicators.nccl.connect", on_gpus=True, doctor_lines=("GPUs", "CuPy", "NCCL")),
}
#: The names that users may pass: "auto" takes the backend that suits all ranks.
BACKENDS = ("auto", *TABLE)


def unknown_backend(name: object, where: str = "") -> str:
    """Returns the text of the error for a name that is not in BACKENDS; `where` is such as " in GRADSYNC_BACKEND"."""
    return f"unknown backend {name!r}{where}: use one of {', '.join(BACKENDS)}"
