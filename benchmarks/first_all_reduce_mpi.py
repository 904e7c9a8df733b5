"""The same as first_all_reduce.py, for mpi4py, started by mpiexec."""

import sys
import time

import numpy as np
from mpi4py import MPI

MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, np.ones(1, np.float32))
sys.stdout.write(f"{time.monotonic()}\n")
sys.stdout.flush()
