"""The trial of one backend: an all-reduce of 16 MB, whose result is checked against NumPy's.

    gradsync run -n 2 --backend shm -m gradsync.doctor.trial shm   # mpiexec starts the ranks of the backend "mpi"

`gradsync doctor` starts it in processes of its own, because a backend may crash. A rank whose result is wrong ends with
an error.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import gradsync as gs

_LENGTH = 4 * 1024**2  # float32 elements: 16 MB
_PERIOD = 1009  # a prime, so that data at a wrong offset are wrong too


def main() -> None:
    """Runs the all-reduce as one rank."""
    with gs.init_process_group(sys.argv[1]) as comm:
        xp: Any = np
        if comm.device != "cpu":
            import cupy

            xp = cupy
        source, expected = _values(comm.rank), sum(map(_values, range(comm.world_size)))
        array, wrong = xp.empty(_LENGTH, np.float32), 0
        for _ in range(2):  # the second call uses what the first one has stored
            array[...] = xp.asarray(source)
            comm.all_reduce(array)
            result = array if xp is np else array.get()
            wrong = max(wrong, int(np.count_nonzero(result != expected)))
    # After the block, in which an error would also end the other ranks, and hide whether their results are wrong.
    if wrong:
        raise gs.GradsyncError(f"{wrong:,} of {_LENGTH:,} sums on rank {comm.rank} are wrong")


def _values(rank: int) -> Any:
    """Returns the input of a rank: small integers, so that no sum is rounded, different on each rank."""
    return np.resize(np.random.default_rng(rank).integers(1, 9, _PERIOD).astype(np.float32), _LENGTH)


if __name__ == "__main__":
    main()
