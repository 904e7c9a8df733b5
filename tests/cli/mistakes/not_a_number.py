# gradsync run -n 2 --backend shm {}  # either rank
import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    weights = np.zeros(2)
    gs.bcast_list_([weights])
    for policy in ("off", "raise"):
        sync = gs.AllreduceCallback(nonfinite=policy)
        with sync.backward():
            mean = sync("weights", np.array([1.0, np.nan if comm.rank == 1 else 1.0]))
        print(mean.result(), flush=True)
