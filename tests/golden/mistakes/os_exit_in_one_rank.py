# gradsync run -n 2 --backend shm {}  # deep
import os

import gradsync as gs

with gs.init_process_group() as comm:
    if comm.rank == 1:
        os._exit(0)
    comm.barrier()
