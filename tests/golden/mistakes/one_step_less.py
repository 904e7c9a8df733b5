# gradsync run -n 2 --backend shm {}
import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    sync = gs.AllreduceCallback()
    for _ in range(3 - comm.rank):
        with sync.backward():
            sync("weights", np.ones(3))
