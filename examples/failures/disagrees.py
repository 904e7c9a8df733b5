"""A rank hands over a gradient less than the others: gradsync run -n 2 examples/failures/disagrees.py"""

import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    weights = {"conv": np.ones(3), "dense": np.ones(3), "bias": np.ones(3)}
    gs.bcast_list_(list(weights.values()))
    sync = gs.AllreduceCallback("mean")
    names = weights if comm.rank == 0 else ["conv", "bias"]
    try:
        with sync.backward():
            for name in names:
                sync(name, 2 * weights[name])
    except gs.PlanMismatch as error:
        if comm.rank == 0:
            print(error)
