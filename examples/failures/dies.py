"""A rank is killed in a backward pass: gradsync run -n 3 examples/failures/dies.py"""

import os
import signal

import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    sync = gs.AllreduceCallback("mean")
    for step in range(10):
        if comm.rank == 1:
            print(f"step {step}", flush=True)
        with sync.backward():
            sync("dense", np.ones(1000))
            if (step, comm.rank) == (1, 1):
                os.kill(os.getpid(), signal.SIGKILL)  # like an operator or a batch system
            sync("conv", np.ones(1000))
