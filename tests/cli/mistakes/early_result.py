# gradsync run -n 2 --backend shm {}  # either rank
import numpy as np

import gradsync as gs

with gs.init_process_group():
    weights = np.zeros(2)
    gs.bcast_list_([weights])
    sync = gs.AllreduceCallback()
    with sync.backward():
        gradient = sync("weights", np.ones(2))
        weights -= 0.1 * gradient.result()
