# GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS=3 gradsync run -n 2 --backend shm {}
import time

import gradsync as gs

with gs.init_process_group() as comm:
    if comm.rank == 1:
        time.sleep(600)
    comm.barrier()
