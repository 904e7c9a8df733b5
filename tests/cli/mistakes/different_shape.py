# gradsync run -n 2 --backend shm {}  # either rank
import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    weights = np.zeros(3)
    gs.bcast_list_([weights])
    sync = gs.AllreduceCallback()
    with sync.backward():
        sync("weights", np.ones(3 + comm.rank))
