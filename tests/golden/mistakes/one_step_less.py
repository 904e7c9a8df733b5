# gradsync run -n 2 --backend shm {}
import time

import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    sync = gs.AllreduceCallback()
    for step in range(3 - comm.rank):
        if step == 2:
            time.sleep(2)  # the other rank has ended then
        with sync.backward():
            sync("weights", np.ones(3))
