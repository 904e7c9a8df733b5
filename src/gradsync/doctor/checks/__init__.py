"""What the doctor looks at, one role a file: each check takes the surroundings, and returns its lines."""

from __future__ import annotations

from collections.abc import Callable

from gradsync.doctor.checks.clock import check_clock
from gradsync.doctor.checks.container import check_container
from gradsync.doctor.checks.cupy_packages import check_cupy
from gradsync.doctor.checks.gpus import check_driver, check_gpus
from gradsync.doctor.checks.limits import check_limits
from gradsync.doctor.checks.mpi import check_mpi
from gradsync.doctor.checks.nccl import check_nccl
from gradsync.doctor.checks.network import check_network, check_ports
from gradsync.doctor.checks.python import check_numpy, check_python
from gradsync.doctor.checks.shared_memory import check_anonymous_memory, check_shared_memory_folder
from gradsync.doctor.checks.threads import check_threads
from gradsync.doctor.checks.variables import check_launcher, check_variables
from gradsync.doctor.finding import Finding
from gradsync.doctor.surroundings import Surroundings

Check = Callable[[Surroundings], list[Finding]]

#: By what a line is called where the check itself fails; in the order of the screen.
CHECKS: dict[str, Check] = {
    "Python": check_python,
    "NumPy": check_numpy,
    "shared memory": check_anonymous_memory,
    "/dev/shm": check_shared_memory_folder,
    "cores": check_threads,
    "container": check_container,
    "limits": check_limits,
    "network": check_network,
    "ports": check_ports,
    "MPI": check_mpi,
    "driver": check_driver,
    "GPUs": check_gpus,
    "CuPy": check_cupy,
    "NCCL": check_nccl,
    "launcher": check_launcher,
    "GRADSYNC_*": check_variables,
    "clock": check_clock,
}
