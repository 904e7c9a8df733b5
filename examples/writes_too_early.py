"""A gradient that is still added to after it was handed over: the debug mode says which, and where."""

import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    sync = gs.AllreduceCallback("mean")
    shared, bias = np.ones(1000), np.ones(10)
    with sync.backward():
        sync("embedding", shared)  # the output layer's part of a weight that two layers share
        sync("bias", bias)
        shared += 1.0  # the input layer's part comes too late
