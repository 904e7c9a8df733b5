"""A rank hands over a gradient less than the others: gradsync run -n 2 examples/failures/disagrees.py"""

import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    sync = gs.AllreduceCallback("mean")
    names = ["conv", "dense", "bias"] if comm.rank == 0 else ["conv", "bias"]
    try:
        with sync.backward():
            for name in names:
                sync(name, np.ones(3))
    except gs.PlanMismatch as error:
        if comm.rank == 0:
            print(error)
