# gradsync run -n 2 --backend shm {}  # either rank
import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    sync = gs.AllreduceCallback()
    with sync.backward():
        for name in ("a", "b") if comm.rank == 0 else ("b", "a"):
            sync(name, np.ones(3))
