# gradsync run -n 2 --backend shm {}  # deep
import time

import gradsync as gs

with gs.init_process_group() as comm:
    if comm.rank == 1:
        time.sleep(7)
    comm.barrier()
    print("done")
