"""A rank dies by a signal: gradsync run -n 2 examples/failures/dies.py"""

import os
import signal

import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    sync = gs.AllreduceCallback("mean")
    for step in range(10):
        if comm.rank == 1:
            print(f"step {step}", flush=True)
        if (step, comm.rank) == (1, 1):
            os.kill(os.getpid(), signal.SIGSEGV)  # as a fault in an extension module would
        with sync.backward():
            sync("weights", np.ones(1000))
