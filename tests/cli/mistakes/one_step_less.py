# gradsync run -n 2 --backend shm {}
import os
import time

import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    weights = np.zeros(3)
    gs.bcast_list_([weights])
    sync = gs.AllreduceCallback()
    guards = comm.objects.all_gather(os.getppid())
    for step in range(3 - comm.rank):
        while step == 2 and os.path.exists(f"/proc/{guards[1]}"):  # until the launcher has seen its end
            time.sleep(0.01)
        with sync.backward():
            gradient = sync("weights", np.ones(3))
        weights -= 0.1 * gradient.result()
