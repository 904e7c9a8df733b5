# gradsync run -n 2 {}
import numpy as np

from gradsync.mpi import MPI

comm = MPI.COMM_WORLD
if comm.rank == 0:
    comm.Isend(np.ones(3), dest=1, tag=3)
comm.Barrier()
