"""The table of backends.

The command line, the checks of arguments and `gradsync doctor` take the names of the backends from this table.

Each backend has one row in the table, and one module, which defines the functions of `BackendModule` in
backend_choice.py.
"""

from __future__ import annotations

from typing import NamedTuple


class BackendRow(NamedTuple):
    """The row of one backend in the table of backends.

    Attributes:
        module: the name of the backend's module. gradsync imports this module only when it uses the backend, because
            most processes use one backend and should start fast.
        on_gpus: whether the backend needs a GPU for each rank; several ranks may share one GPU only with
            allow_shared_gpu.
        under_mpiexec: whether mpiexec or srun must start the ranks of the backend.
        single_rank: whether the backend is for a world of one rank only.
        doctor_lines: the lines of `gradsync doctor` on which the backend depends. If one of these lines says "not
            usable here", gradsync doctor does not try the backend.
    """

    module: str
    on_gpus: bool = False
    under_mpiexec: bool = False
    single_rank: bool = False
    doctor_lines: tuple[str, ...] = ()


#: The backends by name, in the order in which `gradsync doctor` tries them.
TABLE = {
    "local": BackendRow("gradsync.communicators.local", single_rank=True),
    "shm": BackendRow("gradsync.communicators.shared_memory.backend", doctor_lines=("kernels",)),
    "mpi": BackendRow("gradsync.communicators.mpi.backend", under_mpiexec=True, doctor_lines=("MPI",)),
    "nccl": BackendRow("gradsync.communicators.nccl.connect", on_gpus=True, doctor_lines=("GPUs", "CuPy", "NCCL")),
}
#: The names that users may pass as a backend. "auto" is no backend: gradsync then chooses one for all ranks.
BACKENDS = ("auto", *TABLE)


def unknown_backend(name: object, where: str = "") -> str:
    """Returns the error text for a name that is not in BACKENDS; `where` is text such as " in GRADSYNC_BACKEND"."""
    return f"unknown backend {name!r}{where}: use one of {', '.join(BACKENDS)}"
