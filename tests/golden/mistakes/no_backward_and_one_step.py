# GRADSYNC_BACKEND=local python {}
import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    gradient = np.full(3, float(comm.rank))
    sync = gs.AllreduceCallback()
    sync("weights", gradient)
