# gradsync run -n 2 --backend shm {}  # either rank, either line
import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    if comm.rank == 0:
        comm.reduce(np.ones(1), "max")
    comm.all_reduce(np.ones(3))
