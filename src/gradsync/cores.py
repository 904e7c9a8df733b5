"""How many cores this process may use, and how ranks share them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

#: What tells libraries of linear algebra how many threads to start.
BLAS_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def usable_cores() -> int:
    """Gives the number of cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def blas_thread_variables(n_processes: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Gives the thread-count variables that keep `n_processes` ranks from fighting for the cores.

    Args:
        n_processes: number of ranks that share this machine.
        environ: the variables; those that the user has set already are left alone.

    Returns:
        The variables to add, each with max(1, usable cores // n_processes).
    """
    threads = str(max(1, usable_cores() // max(1, n_processes)))
    return {name: threads for name in BLAS_VARIABLES if name not in environ}


def begin_on_core(number: int) -> None:
    """Moves the calling thread to the core of this number among those it may use, and lets it go from there.

    Ranks that started together often share a core. Where every core has something else to do, the kernel leaves them
    there: each collective then waits for another rank's turn, 26 us instead of 5 for 4 KB on two ranks.

    Args:
        number: of the rank on this machine; counts round where there are fewer cores.
    """
    with contextlib.suppress(OSError, AttributeError):  # not Linux, or not allowed
        usable = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {sorted(usable)[number % len(usable)]})
        os.sched_setaffinity(0, usable)
