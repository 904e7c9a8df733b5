# GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS=2 gradsync run -n 2 {}
import time

import numpy as np

from gradsync.mpi import MPI

comm = MPI.COMM_WORLD
if comm.rank == 0:
    comm.Send(np.ones(3), dest=1, tag=3)
    time.sleep(600)
else:
    comm.Recv(np.empty(3), source=0, tag=4)
