# gradsync run -n 2 --backend shm {}
import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    weights = np.random.default_rng().normal(size=3)
    sync = gs.AllreduceCallback()
    for _ in range(2):
        gradient = np.full(3, float(comm.rank))
        with sync.backward():
            sync("weights", gradient / 2)
        weights -= 0.1 * gradient
