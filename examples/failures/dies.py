"""A rank is killed in a backward pass: gradsync run -n 3 examples/failures/dies.py"""

import os
import signal

import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    weights = {"dense": np.ones(1000), "conv": np.ones(1000)}
    gs.bcast_list_(list(weights.values()))
    sync = gs.AllreduceCallback("mean")
    for step in range(10):
        if comm.rank == 1:
            print(f"step {step}", flush=True)
        with sync.backward():
            sync("dense", 2 * weights["dense"])
            if (step, comm.rank) == (1, 1):
                os.kill(os.getpid(), signal.SIGKILL)  # like an operator or a batch system
            sync("conv", 2 * weights["conv"])
        for name, gradient in sync.results().items():
            weights[name] -= 0.1 * gradient
