"""A rank hangs in its data loader: gradsync run -n 2 examples/failures/stalls.py"""

import time

import numpy as np

import gradsync as gs


def read_shard(step, rank):
    if (step, rank) == (1, 1):
        time.sleep(3600)  # like a file server that does not answer
    return np.ones(1000)


with gs.init_process_group(collective_timeout_seconds=6) as comm:  # default: 300
    weights = np.zeros(1000)
    gs.bcast_list_([weights])
    sync = gs.AllreduceCallback("mean")
    for step in range(10):
        batch = read_shard(step, comm.rank)
        with sync.backward():
            gradient = sync("weights", weights - batch)
        weights -= 0.1 * gradient.result()
