# gradsync run -n 2 --backend shm {}  # either rank, deep
import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    comm.all_reduce(np.ones(3, np.float32 if comm.rank == 0 else np.float64))
