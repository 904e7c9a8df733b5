# gradsync run -n 2 --backend shm {}  # either rank
import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    weights = np.zeros(2)
    gs.bcast_list_([weights])
    generator, discriminator = gs.AllreduceCallback(), gs.AllreduceCallback()
    pairs = [(generator, np.full(2, 1.0)), (discriminator, np.full(2, 1000.0))]
    for sync, gradient in pairs if comm.rank == 0 else reversed(pairs):
        with sync.backward():
            sync("weights", gradient)
    print(pairs[0][1], pairs[1][1])
