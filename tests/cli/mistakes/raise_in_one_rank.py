# gradsync run -n 2 --backend shm {}
import numpy as np

import gradsync as gs


def load_batch(rank):
    if rank == 1:
        raise FileNotFoundError("no shard 1")


with gs.init_process_group() as comm:
    load_batch(comm.rank)
    comm.all_reduce(np.ones(3))
