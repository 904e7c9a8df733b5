"""A rank raises an exception: gradsync run -n 2 examples/failures/raises.py"""

import numpy as np

import gradsync as gs


def read_shard(step, rank):
    if (step, rank) == (3, 1):
        raise FileNotFoundError("no shard train-0003.npz")
    return np.ones(1000)


with gs.init_process_group() as comm:
    weights = np.zeros(1000)
    gs.bcast_list_([weights])
    sync = gs.AllreduceCallback("mean")
    for step in range(10):
        batch = read_shard(step, comm.rank)
        with sync.backward():
            gradient = sync("weights", weights - batch)
        weights -= 0.1 * gradient.result()
